"""Ranks that may have processes of their own, for tests of loaders with workers, and small data sets for them.

The workers of `harness.run_ranks` are daemons, which cannot start any. These are forked with torch imported,
and end after one job: `run_job(fn, size, folder, ...)` runs `fn(rank, ...)` on each and returns what they returned.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.helpers.forked import start_process

LIMIT_SECONDS = 60.0

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = "time year people way day man thing woman life child world school state family student group".split()
TINY_BERT = {"layers": 1, "hidden": 16, "heads": 2, "feed_forward": 32, "max_position": 32, "vocab_size": 200}


def start_job(fn: Callable[..., Any], size: int, folder: Path, *args: Any) -> list[Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return [start_process(_one_rank, fn, rank, size, str(folder), args, daemon=False) for rank in range(size)]


def finish_job(processes: list[Any], folder: Path, limit_seconds: float = LIMIT_SECONDS) -> list[Any]:
    """What each rank returned; a rank that raised, hung or was killed is an error here."""
    until = time.monotonic() + limit_seconds
    try:
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    values = []
    for rank, code in enumerate(codes):
        failure = folder / f"failure.{rank}"
        assert code == 0, f"rank {rank} ended with {code}: {failure.read_text() if failure.exists() else ''}"
        values.append(json.loads((folder / f"value.{rank}").read_text()))
    return values


def left_behind(processes: list[Any]) -> list[int]:
    """Ranks of a job, and what they have started, that still run."""
    ours, found = {process.pid for process in processes}, []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            is_dead = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            if os.getsid(int(name)) in ours and not is_dead:
                found.append(int(name))
    return found


def run_job(fn: Callable[..., Any], size: int, folder: Path, *args: Any, limit_seconds: float = LIMIT_SECONDS) -> list[Any]:
    return finish_job(start_job(fn, size, folder, *args), folder, limit_seconds)


def _one_rank(fn: Callable[..., Any], rank: int, size: int, folder: str, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    from fleetx import fleet

    os.setsid()  # so that `left_behind` finds what this rank starts
    os.environ["FLEETX_DEVICE"] = "cpu"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
        fleet.init()
        Path(folder, f"value.{rank}").write_text(json.dumps(fn(rank, *args)))
    except BaseException:
        Path(folder, f"failure.{rank}").write_text(traceback.format_exc())
        raise


def write_images(folder: Path, count: int, *, side: int = 40) -> Path:
    """`count` different JPEG files with `train.txt`, and the same in `images.tar` beside the folder."""
    (folder / "train").mkdir(parents=True)
    generator = np.random.default_rng(1)
    lines = []
    for number in range(count):
        pixels = generator.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((side + number % 5, side), Image.Resampling.BICUBIC).save(
            folder / "train" / f"{number}.jpg"
        )
        lines.append(f"train/{number}.jpg {number % 10}\n")
    (folder / "train.txt").write_text("".join(lines))
    pack(folder)
    return folder


def pack(folder: Path) -> Path:
    archive_path = folder.parent / "images.tar"
    with tarfile.open(archive_path, "w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                info = tarfile.TarInfo(str(path.relative_to(folder)))
                info.size = path.stat().st_size
                archive.addfile(info, io.BytesIO(path.read_bytes()))
    return archive_path


def write_digital(folder: Path, count: int) -> Path:
    """Lines of Fleet's numbers of 8 to 18 tokens; `vocab.txt` beside the folder has 200."""
    folder.mkdir(parents=True)
    (folder.parent / "vocab.txt").write_text("".join(f"{token}\n" for token in [*SPECIAL, *(f"w{i}" for i in range(195))]))
    generator = np.random.default_rng(2)
    lines = []
    for number in range(count):
        first, second = (generator.integers(5, 200, generator.integers(2, 8)).tolist() for _ in range(2))
        tokens = [2, *first, 3, *second, 3]
        sentences = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        fields = (tokens, sentences, range(len(tokens)))
        lines.append(";".join([*(" ".join(map(str, field)) for field in fields), str(number % 2)]) + "\n")
    (folder / "part-0").write_text("".join(lines))
    return folder


def write_prose(folder: Path, documents: int) -> Path:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(3)
    for number in range(documents):
        sentences = [" ".join(generator.choice(WORDS, generator.integers(3, 9))) + "." for _ in range(24)]
        (folder / f"{number}.txt").write_text("\n".join(sentences) + "\n")
    return folder


def image_hashes(batch: Any) -> list[str]:
    images, labels = batch
    return [_sha(image.contiguous(), label) for image, label in zip(images, labels, strict=True)]


def text_hashes(batch: Any) -> list[str]:
    """Of the unpadded part of each row, and what is to be guessed in it: how far a row is padded depends on its neighbours."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    width = ids.shape[1]
    rows = batch["mlm_positions"] // width
    found = []
    for row in range(len(ids)):
        length = width if mask is None else int(mask[row].sum())
        chosen = rows == row
        places = batch["mlm_positions"][chosen] % width
        parts = (ids[row, :length], batch["token_type_ids"][row, :length], places, batch["mlm_labels"][chosen])
        assert not ids[row, length:].any() and int(places.max()) < length
        found.append(_sha(*parts, batch["next_sentence_label"][row]))
    return found


def _sha(*tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]
