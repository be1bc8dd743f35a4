"""`fleetx doctor`: facts of this machine, gathered; checks of them, pure functions; a trial of ranks that talk; words."""
