"""The client of an ordinary Flower app: nothing of fedbasin."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import Net, load_data
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the received model on local rows."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader, _ = _loaders(context)
    lr, epochs = msg.content["config"]["lr"], context.run_config["local-epochs"]
    loss = train_fn(model, loader, epochs, lr)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the received model on local rows."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, loader = _loaders(context)
    loss, accuracy = test_fn(model, loader)
    numbers = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(numbers)}), reply_to=msg)


def _loaders(context: Context):
    place = context.node_config["partition-id"], context.node_config["num-partitions"]
    return load_data(*place, context.run_config["batch-size"])
