"""Figures of the report: drawn from the rows given, and made fit to stand inside one HTML page."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import re
import signal
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from harness.errors import describe
from harness.report.text import one_line

_SVG = "{http://www.w3.org/2000/svg}"
_HREFS = ("{http://www.w3.org/1999/xlink}href", "href")
#: What matplotlib draws with. Anything else in a file has no business in the page.
_ELEMENTS = {"svg", "g", "defs", "path", "use", "clipPath", "rect", "circle", "ellipse", "line", "polyline", "polygon",
             "pattern", "linearGradient", "radialGradient", "stop", "text", "tspan"}  # fmt: skip
_URL = re.compile(r"url\(\s*['\"]?([^)'\"]*)['\"]?\s*\)")


@dataclass(frozen=True)
class Figure:
    """A figure: its name, the folder of its GPU, one sentence on it, and its SVG file."""

    name: str
    folder: str
    caption: str
    svg: Path


def _worker() -> None:
    # The parent is told of Ctrl-C and ends its workers; each of them would print a traceback of its own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _quiet()


def _quiet() -> None:
    # "building the font cache" at the first run on a machine is nothing to warn of.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)


def _draw(results: Path, output: Path, name: str) -> tuple[list[Path], str]:
    """The files of one figure, or a sentence why there are none."""
    import plots

    try:
        written, _ = plots.draw(results, output, [name])
    except Exception as error:
        return [], one_line(f"figure {name} was not drawn: {describe(error)}", 300)
    return written, ""


def _captions() -> dict[str, str]:
    """A figure's caption is the first line of its module's docstring."""
    import plots

    found = {}
    for name, function in [*plots.FIGURES.items(), *plots.RUN_FIGURES.items()]:
        about = (function.module().__doc__ if isinstance(function, plots.InModule) else None) or name
        found[name] = one_line(about.strip().split("\n\n")[0])
    return found


def draw(results: Path, output: Path) -> tuple[list[Figure], list[str]]:
    """Draw every figure for every GPU into ``output/<gpu>/``: figures first, then what could not be drawn.

    They are always drawn anew, so that they fit the rows. A figure takes seconds, hence several processes."""
    _quiet()
    # matplotlib's font cache, where there is none yet, is made here once and not by every process.
    captions = _captions()
    names = list(captions)
    context = multiprocessing.get_context("spawn")
    processes = min(len(names), multiprocessing.cpu_count(), 8)
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_worker) as pool:
        try:
            done = list(pool.map(functools.partial(_draw, results, output), names))
        except BrokenProcessPool:
            return [], ["The figures were not drawn: a process that draws them was ended, perhaps for want of memory"]
        except BaseException:
            # Ctrl-C is not to wait for the figures at hand; the pool has no other children in this process.
            for process in multiprocessing.active_children():
                process.kill()
            raise
    problems = [problem for _, problem in done if problem]
    figures = [
        Figure(path.stem, path.parent.name, captions.get(path.stem, path.stem), path)
        for written, _ in done
        for path in written
        if path.suffix == ".svg"
    ]
    # By GPU, the headline first, the others in the order in which they are named.
    return sorted(figures, key=lambda figure: (figure.folder, figure.name != "headline")), problems


def inline(figure: Figure) -> str:
    """The SVG element of a file for an HTML page: ids get the figure's prefix, since matplotlib's repeat from file to
    file; what nothing refers to loses its id; scripts, links and comments are left out."""
    root = ElementTree.parse(figure.svg).getroot()
    prefix = re.sub(r"[^a-z0-9]+", "-", f"{figure.folder}-{figure.name}".lower()) + "-"
    used = set(_references(root))
    element = _copy(root, prefix, used)
    for size in ("width", "height"):
        element.attrib.pop(size, None)
    element.set("role", "img")
    element.set("aria-label", figure.caption)
    return ElementTree.tostring(element, encoding="unicode")


def _references(root: ElementTree.Element) -> Iterator[str]:
    for element in root.iter():
        for name, value in element.attrib.items():
            if name in _HREFS:
                yield value.removeprefix("#")
            yield from (target.removeprefix("#") for target in _URL.findall(value))


def _copy(element: ElementTree.Element, prefix: str, used: set[str]) -> ElementTree.Element:
    copy = ElementTree.Element(element.tag.removeprefix(_SVG))
    for name, value in element.attrib.items():
        if name in _HREFS:
            if value.startswith("#"):
                copy.set("href", f"#{prefix}{value[1:]}")
        elif name == "id":
            if value in used:
                copy.set("id", prefix + value)
        elif name.startswith("{") or name.lower().startswith("on"):
            continue
        else:
            copy.set(name, _URL.sub(lambda found: _local(found.group(1), prefix), " ".join(value.split())))
    if element.text and element.text.strip():
        copy.text = element.text
    for child in element:
        # Comments have no name; elements of other namespaces (metadata) keep theirs.
        if isinstance(child.tag, str) and child.tag.removeprefix(_SVG) in _ELEMENTS and child.tag.startswith(_SVG):
            copy.append(_copy(child, prefix, used))
    return copy


def _local(target: str, prefix: str) -> str:
    return f"url(#{prefix}{target[1:]})" if target.startswith("#") else "none"
