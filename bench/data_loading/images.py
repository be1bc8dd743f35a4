"""The image half of bench/data_loading: passes over the same files by our loader, by bare processes, and by torchvision.

A block is one whole pass, from asking for the first batch to the last one lying normalised on the device. Blocks take turns, in
swapped order, with all workers of the others idle.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fleetx.data.images.augment import CROP_DRAWS, normalisation
from fleetx.data.images.decode import open_image
from fleetx.data.images.from_paths import image_list_source
from fleetx.data.images.list_source import ImageListSource, training_view
from fleetx.data.loader import Loader
from fleetx.data.stateless_random import uniforms

Block = Callable[[], float]
"""One pass; the seconds it took."""
CLASSES = 10


def image_figures(args: argparse.Namespace) -> dict[str, Any]:
    """One row for 32 x 32 pixels, one for photos of 500 x 375 scaled to 224 x 224."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="data_loading_") as folder:
        cases = {
            "small": (Path(args.cifar) if args.cifar else small_images(Path(folder) / "small", args.small), 32, 256, args.small),
            "photos": (photos(Path(folder) / "photos", args.photos), 224, 64, args.photos),
        }
        for name, (place, image_size, batch_size, files) in cases.items():
            batches = args.rounds_of_workers[name] * args.workers
            row = measure(place, image_size, batch_size, batches, min(files, batches * batch_size), args)
            figures[f"images_{name}"] = {"image_size": image_size, "batch_size": batch_size, "workers": args.workers} | row
            print(f"images_{name:8} {row}", flush=True)
    return figures


def measure(place: Path, image_size: int, batch_size: int, batches: int, files: int, args: argparse.Namespace) -> dict[str, Any]:
    lines = (place / "train.txt").read_text().splitlines()
    # Spread over all classes; each file as often as the pass needs it.
    chosen = lines[:: max(1, len(lines) // files)][:files]
    wanted = [chosen[i % len(chosen)] for i in range(batches * batch_size)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(wanted) + "\n")
        file.flush()
        source = image_list_source(file.name, place, train=True, image_size=image_size, num_classes=CLASSES)
    images = len(source)
    with bare_processes(source, args.workers, batch_size) as limit:
        blocks = {"ours": our_pass(source, batch_size, args.workers), "limit": limit}
        theirs = torchvision_pass(place, wanted, image_size, batch_size, args)
        if theirs is not None:
            blocks["torchvision"] = theirs
        times = in_turns(blocks, args.blocks)
    row: dict[str, Any] = {f"{name}_per_s": round(images / statistics.median(taken)) for name, taken in times.items()}
    for name in blocks.keys() - {"ours"}:
        ratios = [other / own for own, other in zip(times["ours"], times[name], strict=True)]
        row[f"of_{name}"] = round(statistics.median(ratios), 4)
        row[f"of_{name}_quartiles"] = [round(q, 4) for q in statistics.quantiles(ratios, n=4)[::2]]
    return row


def in_turns(blocks: dict[str, Block], count: int) -> dict[str, list[float]]:
    """Neighbours in time make a pair, so that drift of a shared machine falls on all."""
    times: dict[str, list[float]] = {name: [] for name in blocks}
    for block in blocks.values():
        block()
    for turn in range(count):
        for name in sorted(blocks, reverse=bool(turn % 2)):
            times[name].append(blocks[name]())
    return times


def timed(a_pass: Callable[[], None]) -> float:
    start = time.perf_counter()
    a_pass()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def our_pass(source: ImageListSource, batch_size: int, workers: int) -> Block:
    loader = Loader(source, batch_size, shuffle=True, workers=workers)

    def a_pass() -> None:
        for images, _labels in loader:
            assert images.dtype == torch.float32

    return lambda: timed(a_pass)


@contextmanager
def bare_processes(source: ImageListSource, workers: int, batch_size: int) -> Iterator[Block]:
    """What the machine can do: as many processes as there are workers, each decoding its share into one and the same array."""
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(workers + 1)

    def work(rank: int) -> None:
        out = np.empty((source.image_size, source.image_size, 3), dtype=np.uint8)
        epoch = 0
        while True:
            gate.wait()
            mine = np.random.default_rng(epoch).permutation(len(source))[rank::workers]
            for group in (mine[i : i + batch_size] for i in range(0, len(mine), batch_size)):
                draws = uniforms(0, epoch, group[:, None], np.arange(1 + CROP_DRAWS)).tolist()
                for index, row in zip(group.tolist(), draws, strict=True):
                    image = open_image(source.files.read(index))
                    training_view(image, source.image_size, row[1:], out, mirrored=row[0] < 0.5)
            gate.wait()
            epoch += 1

    processes = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(workers)]
    for process in processes:
        process.start()

    def a_pass() -> None:
        gate.wait()
        gate.wait()

    try:
        yield lambda: timed(a_pass)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def torchvision_pass(place: Path, wanted: list[str], size: int, batch_size: int, args: argparse.Namespace) -> Block | None:
    """ImageFolder, v2 transforms and torch's DataLoader, with bytes to the device and normalisation there, as ours."""
    try:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2
    except Exception as error:  # a torchvision that does not match torch fails in many ways
        print(f"torchvision is left out: {error}", flush=True)
        return None
    crop = v2.RandomCrop(size, padding=4) if size < 64 else v2.RandomResizedCrop(size, antialias=True)
    dataset = ImageFolder(str(place / "train"), v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()]))
    label_of = dict(dataset.samples)
    paths = [str(place / line.rsplit(None, 1)[0]) for line in wanted]
    dataset.samples = dataset.imgs = [(path, label_of[path]) for path in paths]
    device = torch.device(args.device)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size, shuffle=True, num_workers=args.workers, pin_memory=device.type == "cuda", drop_last=True,
        persistent_workers=True,
    )  # fmt: skip
    shift, factor = normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), device)

    def a_pass() -> None:
        for images, labels in loader:
            moved, _labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            assert moved.to(torch.float32).sub_(shift).mul_(factor).dtype == torch.float32

    return lambda: timed(a_pass)


def photos(folder: Path, count: int) -> Path:
    """JPEGs of 500 x 375, each another part of scikit-learn's two photographs."""
    from sklearn.datasets import load_sample_images

    originals = [Image.fromarray(image) for image in load_sample_images().images]
    generator = np.random.default_rng(0)

    def one(number: int) -> Image.Image:
        width = int(generator.integers(320, 560))
        left, top = generator.integers(0, 640 - width), generator.integers(0, 427 - width * 3 // 4)
        return originals[number % 2].resize((500, 375), Image.Resampling.BICUBIC, (left, top, left + width, top + width * 3 // 4))

    return written(folder, count, one)


def small_images(folder: Path, count: int) -> Path:
    """JPEGs of 32 x 32, the same photographs in little."""
    from sklearn.datasets import load_sample_images

    originals = [Image.fromarray(image) for image in load_sample_images().images]
    generator = np.random.default_rng(0)

    def one(number: int) -> Image.Image:
        left, top = generator.integers(0, 500), generator.integers(0, 300)
        return originals[number % 2].resize((32, 32), Image.Resampling.BICUBIC, (left, top, left + 120, top + 120))

    return written(folder, count, one)


def written(folder: Path, count: int, one: Callable[[int], Image.Image]) -> Path:
    """Files of quality 90 in a folder for each class, and the list of them."""
    lines = []
    for label in range(CLASSES):
        os.makedirs(folder / "train" / str(label))
    for number in range(count):
        stream = io.BytesIO()
        one(number).save(stream, "JPEG", quality=90)
        name = f"train/{number % CLASSES}/{number}.jpg"
        (folder / name).write_bytes(stream.getvalue())
        lines.append(f"{name} {number % CLASSES}\n")
    (folder / "train.txt").write_text("".join(lines))
    return folder


# torch's advice about machines with fewer cores than workers; the number was asked for.
warnings.filterwarnings("ignore", message="This DataLoader will create")
