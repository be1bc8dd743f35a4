"""The wheel in an empty environment, outside the source tree: with its hard dependencies alone, all that needs no more works.

Installing torch again takes minutes. So the environment is a fresh one without site packages, to which the installed files of the
hard dependencies, and of what they need in turn, are linked: whatever else fleetx imported would be missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import fleetx
from fleetx.cli.main import PARTS

requirements = pytest.importorskip("packaging.requirements", reason="packaging reads the wheel's dependencies")
pytest.importorskip("build", reason="build makes the wheel")

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240
OPTIONAL = (
    *("accelerate", "transformers", "matplotlib", "sklearn", "tokenizers", "lightning", "ray", "tensorboard", "mkdocs"),
    *("pytest", "hypothesis", "playwright", "build", "packaging"),
)
TRAINS = """
import torch
from fleetx import fleet

fleet.init()
torch.manual_seed(fleet.worker_index())
model = torch.nn.Linear(4, 1)
strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
x = torch.randn(64, 4)
y = x @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
losses = [float(optimizer.minimize((model(x) - y).square().mean()).loss) for _ in range(60)]
assert losses[-1] < 0.01 * losses[0], losses
fleet.save_model("model.safetensors", model, optimizer)
print(f"trained on {fleet.worker_num()} ranks by {fleet.__file__}")
"""


@dataclass(frozen=True)
class Installed:
    wheel: Path
    bin: Path
    work: Path
    """An empty folder to be in."""

    def run(self, *words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """A command of this environment."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        env = kept | {"PATH": f"{self.bin}:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "FLEETX_DEVICE": "cpu"}
        line = [str(self.bin / words[0]), *words[1:]]
        where = folder or self.work
        return subprocess.run(line, cwd=where, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS)


def metadata_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def needed_by(wheel: Path) -> dict[str, importlib.metadata.Distribution]:
    """The hard dependencies, and theirs, as installed here."""
    waiting = Parser().parsestr(metadata_of(wheel)).get_all("Requires-Dist") or []
    found: dict[str, importlib.metadata.Distribution] = {}
    while waiting:
        one = requirements.Requirement(waiting.pop())
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        extras = one.extras or {""}
        if name in found or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        found[name] = importlib.metadata.distribution(name)
        for text in found[name].requires or []:
            marker = requirements.Requirement(text).marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(text)
    return found


def link_files(distribution: importlib.metadata.Distribution, folder: Path) -> None:
    """All that it has put beside other packages; not its commands."""
    tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        link, target = folder / top, Path(str(distribution.locate_file(top)))
        if not link.exists() and target.exists():
            link.symlink_to(target)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    alone = ["--no-isolation"] if importlib.util.find_spec("hatchling") else []
    build = [sys.executable, "-m", "build", "--wheel", *alone, "--outdir", str(folder), str(ROOT)]
    ended = subprocess.run(build, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    subprocess.run([*pip, "--disable-pip-version-check"], check=True, timeout=LIMIT_SECONDS)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    links = folder / "links"
    links.mkdir()
    for distribution in needed_by(wheel).values():
        link_files(distribution, links)
    (packages / "hard_dependencies.pth").write_text(f"{links}\n")
    work = folder / "work"
    work.mkdir()
    return Installed(wheel, folder / "venv" / "bin", work)


# --- what is in it ----------------------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_with_its_types_and_nothing_else(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        names = archive.namelist()
    assert "fleetx/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"fleetx", f"fleetx-{fleetx.__version__}.dist-info"}
    assert not [name for name in names if "test" in name.split("/") or "tests" in name.split("/") or name.endswith(".pyc")]
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "fleetx").rglob("*.py")}
    assert sources <= set(names)


def test_its_metadata_name_version_licence_readme_and_no_addresses(installed: Installed) -> None:
    told = Parser().parsestr(metadata_of(installed.wheel))
    assert (told["Name"], told["Version"], told["License-Expression"]) == ("fleetx", fleetx.__version__, "Apache-2.0")
    assert told["Description-Content-Type"] == "text/markdown" and told["License-File"] == "LICENSE"
    assert told.get_payload().startswith("# FleetX for PyTorch")
    assert told.get_all("Project-URL") is None and told["Home-page"] is None


def test_hard_dependencies_stay_few(installed: Installed) -> None:
    texts = Parser().parsestr(metadata_of(installed.wheel)).get_all("Requires-Dist") or []
    hard = {requirements.Requirement(text).name.lower() for text in texts if "extra ==" not in text}
    assert hard == {"torch", "numpy", "rich", "pyyaml", "safetensors", "pillow", "psutil"}


# --- what works with it -----------------------------------------------------------------------------------------------------


def test_it_is_imported_from_the_environment_where_no_optional_package_is(installed: Installed) -> None:
    script = (
        "import importlib, importlib.util, json, fleetx; from fleetx import applications, fleet, optim, utils; "
        f"print(json.dumps([fleetx.__file__, [name for name in {OPTIONAL!r} if importlib.util.find_spec(name)]]))"
    )
    ended = installed.run("python", "-c", script)
    assert ended.returncode == 0, ended.stderr
    place, optional = json.loads(ended.stdout)
    assert Path(place).is_relative_to(installed.bin.parent)
    assert optional == []


def test_fleetrun_trains_a_script_on_two_ranks(installed: Installed) -> None:
    (installed.work / "train.py").write_text(TRAINS)
    ended = installed.run("fleetrun", "--nproc_per_node", "2", "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"trained on 2 ranks by {installed.bin.parent}" in ended.stdout
    assert (installed.work / "model.safetensors").stat().st_size > 0


def test_fleetx_tells_its_version_and_its_subcommands(installed: Installed) -> None:
    assert installed.run("fleetx", "--version").stdout.strip() == fleetx.__version__
    told = installed.run("fleetx", "--help").stdout
    assert all(part in told for part in PARTS)


def test_fleetx_doctor_finds_the_environment_sound(installed: Installed) -> None:
    ended = installed.run("fleetx", "doctor", "--json", "--sizes", "4B,64KiB")
    assert ended.returncode in (0, 1), ended.stderr
    found = json.loads(ended.stdout)
    told = {topic: [one["level"] for one in found["findings"] if one["topic"] == topic] for topic in ("versions", "all-reduce")}
    assert told == {"versions": ["ok", "ok"], "all-reduce": ["ok"]}, found["findings"]  # of torch, and of all that is installed
    assert any("demo (" in one["what"] for one in found["findings"] if one["topic"] == "extras")


def test_an_example_runs_on_images_of_the_users_own(installed: Installed) -> None:
    folder = installed.work / "example"
    (folder / "images").mkdir(parents=True)
    for name in ("seed_loop.py", "resnet50_gradient_merge.py"):
        (folder / name).write_bytes((ROOT / "examples" / name).read_bytes())
    draw = (
        "from PIL import Image; "
        "[Image.new('RGB', (40, 40), (20 * n, 0, 255 - 20 * n)).save(f'images/{n}.jpg') for n in range(8)]; "
        "open('images/train.txt', 'w').write(''.join(f'{n}.jpg {n % 10}\\n' for n in range(8)))"
    )
    assert installed.run("python", "-c", draw, folder=folder).returncode == 0
    flags = ("--data", "images", "--batch_size", "1", "--steps", "4")
    ended = installed.run("fleetrun", "--nproc_per_node", "2", "resnet50_gradient_merge.py", *flags, folder=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(re.findall(r"^worker_index: 0, step\d+ cost = \d", ended.stdout, flags=re.MULTILINE)) == 4


def test_a_part_that_needs_an_extra_says_which(installed: Installed) -> None:
    script = "import fleetx as X; X.applications.Resnet20().get_train_dataloader('digits', batch_size=2)"
    ended = installed.run("python", "-c", script)
    assert ended.returncode != 0 and 'pip install "fleetx[demo]"' in ended.stderr.replace("'", '"'), ended.stderr


def test_an_import_adds_few_modules_to_torchs(installed: Installed) -> None:
    """What makes an import slow, counted instead of timed."""
    script = "import sys, torch; before = set(sys.modules); from fleetx import fleet; print(*sorted(set(sys.modules) - before))"
    added = installed.run("python", "-c", script).stdout.split()
    ours = [name for name in added if name.split(".")[0] == "fleetx"]
    assert 10 < len(ours) < 100 and len(added) - len(ours) < 60, added


def test_an_import_does_not_bring_what_few_scripts_use(installed: Installed) -> None:
    """What made it slow once: torch's compiler, and planning."""
    heavy = ("torch._dynamo", "sympy", "triton", "yaml", "fleetx.auto.search", "fleetx.recompute.planner", "fleetx.checkpoint")
    script = (
        "import sys, torch; before = set(sys.modules); from fleetx import fleet; "
        f"print([name for name in {heavy!r} if name in set(sys.modules) - before])"
    )
    assert installed.run("python", "-c", script).stdout.strip() == "[]"


# --- files beside it --------------------------------------------------------------------------------------------------------


def test_the_citation_is_of_this_version() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert found["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version", "license", "type"} <= set(found)
    assert found["version"] == fleetx.__version__ and found["license"] == "Apache-2.0" and found["type"] == "software"
    assert found["authors"] == [{"name": "The FleetX for PyTorch authors"}]


def test_the_changelog_names_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[?{re.escape(fleetx.__version__)}\]?", text, flags=re.MULTILINE)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_a_file_beside_the_package_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [target for target in targets if not (ROOT / target).exists()] == []
