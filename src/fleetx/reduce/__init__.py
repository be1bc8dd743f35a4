"""Gradients made small before they travel: what a step does about it (stage), and the maths of each way (sparse, lowrank)."""
