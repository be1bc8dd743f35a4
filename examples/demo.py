"""`make demo`: the digits on two workers, twice: plain, and at a four times larger batch with an eighth of the traffic."""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WORKER = Path(__file__).with_name("demo_worker.py")
WORKERS = 2
TARGET = 0.95


@dataclass(frozen=True)
class Run:
    name: str
    label: str
    lr: float
    strategy: dict[str, Any]


RUNS = (
    Run("plain", "plain: batch 64", lr=0.05, strategy={}),
    Run(
        "merged",
        "merged: batch 256, bfloat16 on the wire",
        lr=0.2,  # four times the batch, four times the rate; clip_norm limits the first large steps
        strategy={
            "gradient_merge": True,
            "gradient_merge_configs": {"k_steps": 4},
            "clip_norm": True,
            "bf16_allreduce": True,
        },
    ),
)
Curve = list[dict[str, Any]]  # one entry per epoch


def launch(run: Run, folder: Path, epochs: int) -> int:
    """Run one fleetrun; return its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "asked.json").write_text(json.dumps(run.strategy), encoding="utf-8")
    fleetrun = [sys.executable, "-m", "fleetx.launch", "--nproc_per_node", str(WORKERS), "--log_dir", str(folder / "log")]
    settings = {"strategy": folder / "asked.json", "lr": run.lr, "epochs": epochs, "run": folder}
    process = subprocess.Popen([*fleetrun, str(WORKER), *(f"--{key}={value}" for key, value in settings.items())])
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # fleetrun receives it too and ends its workers, which ends this wait
            continue


def read_curve(folder: Path) -> Curve:
    """Read the last start's accuracy at each evaluation, with sums over the updates that fleet.Monitor has logged."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve, samples, bytes_sent = [], 0, 0
    for line in lines:
        if line["start"] != lines[-1]["start"]:
            continue
        samples, bytes_sent = samples + line["samples"], bytes_sent + line["bytes_sent"]
        done = {"updates": line["step"], "samples": samples, "bytes_sent": bytes_sent, "seconds": line["seconds"]}
        if "acc" in line["values"]:
            curve.append({"accuracy": line["values"]["acc"], **done})
    return curve


def make_page(folders: list[Path], page: Path) -> int:
    """Make one page of all runs; return the exit code of `fleetx report`."""
    report = [sys.executable, "-m", "fleetx.cli", "report", *map(str, folders), "--out", str(page)]
    return subprocess.run(report, check=False, stdout=subprocess.DEVNULL).returncode


def summary(curves: dict[str, Curve]) -> Table:
    table = Table(title=f"Digits on {WORKERS} workers")
    for heading in ("run", "test accuracy", "updates", "MB sent per worker", "seconds"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for name, curve in curves.items():
        last = curve[-1]
        sent = f"{last['bytes_sent'] / 1e6:.2f}"
        table.add_row(name, f"{last['accuracy']:.1%}", str(last["updates"]), sent, f"{last['seconds']:.1f}")
    return table


def draw(curves: dict[str, Curve], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (accuracy, wire) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for run, curve, color in zip(RUNS, curves.values(), ("#3465a4", "#d9622b"), strict=True):
        samples = [entry["samples"] for entry in curve]
        accuracy.plot(samples, [100 * entry["accuracy"] for entry in curve], "o-", ms=4, color=color, label=run.label)
        sent = [entry["bytes_sent"] / 1e6 for entry in curve]
        wire.plot(samples, sent, "o-", ms=4, color=color)
        wire.annotate(f"{sent[-1]:.1f} MB", (samples[-1], sent[-1]), (0, 7), textcoords="offset points", ha="right", color=color)
    accuracy.axhline(100 * TARGET, color="grey", lw=1, ls="--", label=f"target: {TARGET:.0%}")
    accuracy.legend(loc="lower right", frameon=False)
    accuracy.set(ylabel="test accuracy (%)", xlabel="samples seen", ylim=(None, 101))
    wire.set(ylabel="sent by each worker (MB)", xlabel="samples seen", ylim=(0, None))
    wire.margins(y=0.12)
    for axes in (accuracy, wire):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Handwritten digits on {WORKERS} workers: test accuracy and traffic")
    figure.savefig(path, dpi=120)


def shortfalls(curves: dict[str, Curve]) -> list[str]:
    return [
        f"{name}: {curve[-1]['accuracy']:.1%} test accuracy is below the target of {TARGET:.0%}"
        for name, curve in curves.items()
        if curve[-1]["accuracy"] < TARGET
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("demo-run"))
    args = parser.parse_args(argv)
    console = Console()

    for number, run in enumerate(RUNS, start=1):
        console.rule(f"{number}/{len(RUNS)} {run.label}")
        if code := launch(run, args.out / run.name, args.epochs):
            print(f"demo: the {run.name} run ended with exit code {code}; logs: {args.out / run.name / 'log'}", file=sys.stderr)
            return code

    curves = {run.name: read_curve(args.out / run.name) for run in RUNS}
    draw(curves, args.out / "demo.png")
    console.print(summary(curves))
    if code := make_page([args.out / run.name for run in RUNS], args.out / "report.html"):
        return code
    print(f"Curves: {args.out / 'demo.png'}  Both runs in full: {args.out / 'report.html'}", flush=True)
    for line in (missed := shortfalls(curves)):
        print(f"demo: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
