"""The examples that are meant to be copied: they stand alone, read data as people have it, and go on after a stop to the bit."""

from __future__ import annotations

import ast
import os
import random
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import fleetx as X
from fleetx import fleet

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ("imagenet.py", "pretrain_text.py", "finetune_text.py")
LIMIT_S = 300
IMAGENET = ("images --classes 3 --image_size 32 --epochs 2 --batch_size 4 --merge 2 --warmup_epochs 0.5 --workers 0").split()
PRETRAIN = ("texts --layers 1 --hidden 64 --vocab_size 200 --max_seq_len 32 --batch_size 2 --epochs 2 --merge 2").split()
FINETUNE = ("texts --max_seq_len 32 --batch_size 4 --epochs 4 --lr 0.01").split()
WORDS = {"good": ("happy", "fine", "great", "sunny"), "bad": ("sad", "poor", "awful", "rainy")}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `images` and `texts`, each with train/CLASS and val/CLASS; it is the working directory."""
    draw, rng = random.Random(0), np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 3)):
        for shade, name in enumerate(("dark", "grey", "light")):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(80 * shade, 80 * shade + 60, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
        for name, words in WORDS.items():
            folder = tmp_path / "texts" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                lines = [f"the {draw.choice(words)} day {draw.randrange(9)} was {draw.choice(words)}" for _ in range(6)]
                (folder / f"{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, script: str, *flags: str, stop_at: int | None = None) -> None:
    """Run the script in this process, as one worker; with `stop_at` it is asked to stop after so many micro-batches."""
    asked = iter(range(1, 10**6))
    monkeypatch.setattr(sys, "argv", [script, *flags])
    monkeypatch.setattr(fleet, "should_stop", lambda: next(asked) == stop_at)
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def require_equal_bits(first: Path, second: Path) -> None:
    torch.testing.assert_close(load_file(first), load_file(second), rtol=0, atol=0)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_to_copy_imports_no_other_example(script: str) -> None:
    tree = ast.parse((EXAMPLES / script).read_text(encoding="utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not {str(name).split(".")[0] for name in names} & {path.stem for path in EXAMPLES.glob("*.py")}


def test_images_in_folders_train_a_model_and_a_stopped_run_goes_on_to_the_same_bits(
    place: Path, alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def smaller(classes: int, **options: Any) -> Any:
        return X.applications.Resnet20(num_classes=classes, **options)

    monkeypatch.setattr(X.applications, "Resnet50", smaller)
    run(monkeypatch, "imagenet.py", *IMAGENET, "--run", "whole")
    run(monkeypatch, "imagenet.py", *IMAGENET, "--run", "halves", stop_at=9)  # in mid-window, in the second epoch
    assert not Path("halves/model.safetensors").exists()
    run(monkeypatch, "imagenet.py", *IMAGENET, "--run", "halves")
    told = capsys.readouterr().out
    assert "continuing after 9 of 14 micro-batches" in told and told.count("epoch 2: top-1") == 2
    require_equal_bits(place / "whole/model.safetensors", place / "halves/model.safetensors")


def test_text_is_pretrained_and_fine_tuned_and_a_stopped_run_goes_on_to_the_same_bits(
    place: Path, alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "pretrain_text.py", *PRETRAIN, "--run", "whole")
    run(monkeypatch, "pretrain_text.py", *PRETRAIN, "--run", "halves", stop_at=5)
    run(monkeypatch, "pretrain_text.py", *PRETRAIN, "--run", "halves")
    require_equal_bits(place / "whole/model/model.safetensors", place / "halves/model/model.safetensors")
    flags = (*FINETUNE, "--model", "whole/model")
    run(monkeypatch, "finetune_text.py", *flags, "--run", "tuned")
    run(monkeypatch, "finetune_text.py", *flags, "--run", "tuned-halves", stop_at=7)
    run(monkeypatch, "finetune_text.py", *flags, "--run", "tuned-halves")
    require_equal_bits(place / "tuned/model.safetensors", place / "tuned-halves/model.safetensors")
    told = capsys.readouterr().out
    assert "continuing after 5 of" in told and "continuing after 7 of 20 micro-batches" in told
    assert "epoch 4: 100.00% of the texts are sorted right" in told


def test_transformers_reads_the_pretrained_model_and_a_model_of_its_own_is_fine_tuned(
    place: Path, alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers", reason='needs transformers: pip install "fleetx[hf]"')
    run(monkeypatch, "pretrain_text.py", *PRETRAIN, "--epochs", "1", "--run", "base")
    theirs, report = transformers.BertForPreTraining.from_pretrained("base/model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    written = load_file("base/model/model.safetensors")["bert.embeddings.word_embeddings.weight"]
    torch.testing.assert_close(theirs.bert.embeddings.word_embeddings.weight.detach(), written, rtol=0, atol=0)
    run(monkeypatch, "finetune_text.py", *FINETUNE, "--hf", "base/model", "--run", "tuned")
    assert "epoch 4: 100.00% of the texts are sorted right" in capsys.readouterr().out
    assert "classifier.weight" in load_file("tuned/model.safetensors")


def fleetrun(script: str, *flags: str, until: str | None = None) -> tuple[int, str]:
    """Start two workers; with `until` send SIGTERM once a line with these words was shown. Return code and output."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "FLEETX_TTY")}
    env |= {"OMP_NUM_THREADS": "1", "FLEETX_DEVICE": "cpu"}
    command = [sys.executable, "-m", "fleetx.launch", "--nproc_per_node", "2", str(EXAMPLES / script), *flags]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        shown = ""
        if until is not None:
            for line in process.stdout:
                shown += line
                if until in line:
                    process.send_signal(signal.SIGTERM)
                    break
        shown += process.communicate(timeout=LIMIT_S)[0]
    return process.returncode, shown


@pytest.mark.campaign
@pytest.mark.parametrize(
    "script,flags,until,result",
    [
        ("imagenet.py", IMAGENET, "epoch 1:", "model.safetensors"),
        ("pretrain_text.py", [*PRETRAIN, "--epochs", "4"], "epoch 1:", "model/model.safetensors"),
    ],
)
def test_two_workers_of_the_real_size_go_on_after_sigterm_to_the_same_bits(
    place: Path, script: str, flags: list[str], until: str, result: str
) -> None:
    code, told = fleetrun(script, *flags, "--run", "whole")
    assert code == 0, told
    code, told = fleetrun(script, *flags, "--run", "halves", until=until)
    assert code == 143 and not Path("halves", result).exists(), told
    code, told = fleetrun(script, *flags, "--run", "halves")
    assert code == 0 and "continuing after" in told, told
    require_equal_bits(place / "whole" / result, place / "halves" / result)


@pytest.mark.campaign
def test_two_workers_fine_tune_on_a_data_set_of_the_hub(place: Path) -> None:
    pytest.importorskip("datasets", reason="needs the library `datasets`: pip install datasets")
    code, told = fleetrun("pretrain_text.py", *PRETRAIN, "--run", "base")
    assert code == 0, told
    (place / "reviews").mkdir()  # not "csv", which is a format to `datasets`
    for split in ("train", "test"):
        files = sorted((place / "texts" / ("train" if split == "train" else "val")).rglob("*.txt"))
        rows = [f'"{file.read_text().replace(chr(10), " ")}",{int(file.parent.name == "good")}\n' for file in files]
        (place / "reviews" / f"{split}.csv").write_text("text,label\n" + "".join(rows))
    code, told = fleetrun("finetune_text.py", "reviews", *FINETUNE[1:], "--model", "base/model", "--epochs", "8")
    assert code == 0 and "100.00% of the texts are sorted right" in told, told
