"""The README's example of our layer runs, on small sizes."""

from __future__ import annotations

import re
from typing import Any

from harness.registry import ROOT

#: What stands there -> what the interpreter can do in a second: it has no bfloat16.
SMALL = {
    '"cuda"': '"cpu"',
    "bfloat16": "float32",
    "d=1536, n=256, experts=128, k=8": "d=16, n=8, experts=4, k=2",
    "6144, 1536": "3, 16",
}


def test_the_example_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Use our layer", 1)[1].split("\n## ", 1)[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    for there, here in SMALL.items():
        assert there in code
        code = code.replace(there, here)
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["out"].shape == found["x"].shape == (4, 3, 16)
    assert found["x"].grad is not None and found["layer"].router.grad is not None
