"""Safe YAML without its traps: no key twice (merged in either), no aliases (they multiply), and 1e-3 is a number."""

from __future__ import annotations

import re
from typing import Any

import yaml

from .kinds import once


class _StrictLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        scalars = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        once([(key.value, None) for key in scalars])
        if any(key.tag == "tag:yaml.org,2002:merge" for key in scalars):
            raise ValueError("merge keys are not allowed")
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 1e-3 as text, for want of a dot.
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def load(text: str) -> Any:
    return yaml.load(text, Loader=_StrictLoader)
