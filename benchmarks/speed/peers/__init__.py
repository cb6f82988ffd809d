"""The same FedAvg work done by fedbasin and by other simulators, one process each.

`work` writes what all of them share (rows, cohorts, initial model) to a file, `protocol` is how a
peer is asked for rounds, `driver` starts the peers and takes turns between them.
"""
