"""Choose a strategy: measure the model and the network, predict every plan, run the best few, say why."""
