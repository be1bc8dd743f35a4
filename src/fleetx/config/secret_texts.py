"""Hide what looks like a secret in texts that are kept or shown: values of options by their names, tokens by their form."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "(hidden)"
SECRET_WORDS = frozenset(
    "token password passwd pwd pass passphrase secret secrets key apikey auth authorization access credential credentials".split()
)
_PASSWORD_IN_URL = re.compile(r"(://[^/@:\s]*):[^/@\s]+@")
_AFTER = re.compile(
    r"""(?ix)
    ( \bauthorization["']?\s*[:=]\s*["']?(?:[a-z]+\s+)? | \bbearer\s+(?=\S{6}) |                 # HTTP headers
      [?&](?:[a-z_-]*(?:signature|token|credential|api[_-]?key|secret|password)|sig|key)= )   # queries, of signed addresses too
    [^\s&"'\#]+"""
)
_TOKEN = re.compile(
    r"""(?x)
    \b(?: (?:hf|api_org)_[A-Za-z0-9]{16,}                               # Hugging Face
        | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{16,} | glpat-[\w-]{16,}
        | sk-[\w-]{16,} | xox[a-z]-[\w-]{10,} | ya29\.[\w-]{16,}
        | AKIA[0-9A-Z]{16} | ASIA[0-9A-Z]{16} | AIza[\w-]{30,}
        | eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?                           # JSON web tokens
    )"""
)


def without_secrets(text: str) -> str:
    """Hide passwords and signatures in addresses, what follows `Bearer`, and tokens whose form is known."""
    text = _PASSWORD_IN_URL.sub(rf"\1:{HIDDEN}@", text)
    text = _AFTER.sub(rf"\1{HIDDEN}", text)
    return _TOKEN.sub(HIDDEN, text)


def command_without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the command line without values that look secret: `--api-key X`, `hub.token=X`, `https://user:X@host`, `hf_...`."""
    shown, hides_next = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = bool(SECRET_WORDS & set(re.split(r"[-_.+/]", name.lower())))
        shown.append(HIDDEN if hides_next else f"{name}={HIDDEN}" if is_secret and equals else without_secrets(argument))
        hides_next = is_secret and not equals and name.startswith("-")
    return shown
