"""Make every measured page of the documentation, with its charts, from bench/results: `python -m bench.pages`.

No bench is run. `tests/unit/test_measured_pages.py` holds the files to what this makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.auto_regret.page import page as auto_regret
from bench.bert_memory.table import page as memory
from bench.combinations.page import page as combinations
from bench.compression_table.page import page as compression
from bench.large_batch.page import page as large_batch
from bench.lib.results import FOLDER, ROOT, published, write_page
from bench.localsgd_table.page import page as localsgd
from tests.helpers.combination_sets import FLEETS_TEN

DOCS = ROOT / "docs"


def result(name: str) -> dict[str, Any]:
    return published(FOLDER / f"{name}.json", name)


def pages() -> dict[Path, str]:
    """Return the text of each page, by its file."""
    texts = {
        "auto_regret": auto_regret(result("auto_regret"), result("auto_bert")),
        "combinations": combinations(result("combinations"), FLEETS_TEN),
        "compression": compression(result("compression_table"), result("compression_speed")),
        "large_batch": large_batch(result("large_batch")),
        "localsgd": localsgd(result("localsgd_table")),
        "memory": memory(result("bert_memory")),
    }
    return {DOCS / f"{name}.md": text for name, text in texts.items()}


def main() -> int:
    made = pages()
    for path, text in made.items():
        write_page(path, text)
    print(json.dumps([str(path.relative_to(ROOT)) for path in made]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
