"""Shared by the scripts of the seed documents: their common flags, and a loop that prints each step as the seeds do."""

import argparse
import itertools
import time

from fleetx import fleet


def own_flags():
    """Make the parser of `configs.rest`; a script may add flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=None, help="stop after this many micro-batches")
    return parser


def batches(loader, epochs):
    for _ in range(loader.sampler.epoch, epochs):
        yield from loader


def train(model, optimizer, loader, configs, steps=None):
    """Train all epochs, or `steps` micro-batches. With --resume continue from that folder, and save a checkpoint in it."""
    everything = {"model": model, "optimizer": optimizer, "sampler": loader.sampler}
    found = fleet.load_checkpoint(configs.resume, **everything) if configs.resume else None
    step = found.step if found else 0
    model.train()
    for batch in itertools.islice(batches(loader, configs.epochs), steps):
        start = time.perf_counter()
        report = optimizer.minimize(model.loss(batch))
        cost = report.loss  # waits for the device, so that the speed is that of the whole step
        speed = configs.batch_size / (time.perf_counter() - start)
        print(f"worker_index: {fleet.worker_index()}, step{step} cost = {cost:.6f}, speed: {speed:.6f}", flush=True)
        step += 1
    if configs.resume:
        fleet.save_checkpoint(configs.resume, step=step, **everything)  # includes a half-full merge window
    else:
        optimizer.flush()  # else the gradients of a half-full window would be lost
