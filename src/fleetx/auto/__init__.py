"""What `strategy.auto` rests on: measures of the model and the network, and what follows from them."""
