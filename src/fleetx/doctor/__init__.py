"""`fleetx doctor`: gather facts of this machine, check them with pure functions, run a trial of some ranks, print findings."""
