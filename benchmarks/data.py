"""One epoch of small samples: packed by Drumline, small files, torch's DataLoader on folders, WebDataset's loader.

    python benchmarks/data.py [--samples 100000] [--batch 256] [--ranks 1,2,4] [--rounds 5] [--cold 1] [--paste]

A sample is an image of bytes, 3 x 32 x 32, in numpy's format, in one of ten class folders; the batch a tensor of images
and one of labels. Contestants:

    packed      `dl.PackedDataset` of `drumline pack`'s shards, as a rank's engine reads it, checksums included
    files       the same stream of batches, from a dataset that opens one small file per sample
    dataloader  torch's DataLoader on that dataset, with a shuffled sampler per rank
    webdataset  WebDataset's own loader on the same shards, dealt to the ranks, with its shuffle buffer

All decode with the same few lines (no `np.load`, which would slow the others), use one thread, and load in the rank's
process, without workers. Each rank is a process of its own; an epoch takes as long as its slowest rank. In each round
all contestants run once, in an order that rotates; printed are medians, ratios of neighbouring runs with their 95%
interval, the time from opening the data to the first batch, and the memory that a rank adds (private bytes). Every
contestant's labels and pixels must add up to those that were written. The files are in the memory of the operating
system, as they were written. For the cold rows, on the ranks of `--cold`, what a contestant reads is dropped from it
before each run (posix_fadvise; names and inodes stay, which spares the small files the most). Expected before
measuring, in memory: at least 5 times the small files, and not behind WebDataset. It should take two minutes on an idle
machine.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from engine_peers.ratios import Ratio, ratio
from split_contest.page import paste

import drumline as dl
from drumline.datasets import Stream

PAGE = Path(__file__).parent.parent / "docs" / "data.md"
SHAPE, CLASSES, HEADER = (3, 32, 32), 10, 128
SHUFFLE_BUFFER = 1000
"""Of WebDataset, its usual size."""
Batch = tuple[torch.Tensor, torch.Tensor]


def decode_image(data: bytes) -> torch.Tensor:
    """A `.npy` file whose shape is known."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=HEADER).view(SHAPE)


class SmallFiles(torch.utils.data.Dataset[Any]):
    """One file per sample, in class folders, as torchvision's ImageFolder reads them."""

    def __init__(self, root: Path) -> None:
        classes = sorted(os.listdir(root))
        self.files = [(f"{root}/{c}/{f}", k) for k, c in enumerate(classes) for f in sorted(os.listdir(root / c))]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> Any:
        path, label = self.files[i]
        with open(path, "rb") as f:
            return decode_image(f.read()), label


def stream_batches(dataset: Any, ranks: int, rank: int, batch: int) -> Iterator[Batch]:
    """What the engine's `data()` yields."""
    job = dl.Job(model=list, loss=max, optimizer=list, data=list, batch_size=batch * ranks)
    stream = Stream(job, dataset, dp=ranks, index=rank)
    for step in range(stream.steps_per_epoch):
        micro = stream.batch(step).micros[0]
        yield micro.input[: micro.samples], micro.target[: micro.samples]


def packed(folder: Path, ranks: int, rank: int, batch: int) -> Iterator[Batch]:
    """Drumline, packed."""
    return stream_batches(dl.PackedDataset(folder / "packed"), ranks, rank, batch)


def files(folder: Path, ranks: int, rank: int, batch: int) -> Iterator[Batch]:
    """Drumline, one file per sample."""
    return stream_batches(SmallFiles(folder / "files"), ranks, rank, batch)


def dataloader(folder: Path, ranks: int, rank: int, batch: int) -> Iterator[Batch]:
    """torch's DataLoader."""
    data = SmallFiles(folder / "files")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    return iter(torch.utils.data.DataLoader(data, batch_size=batch, sampler=order[rank::ranks]))


def webdataset(folder: Path, ranks: int, rank: int, batch: int) -> Iterator[Batch]:
    """WebDataset's loader on its share of the shards."""
    shards = sorted(str(p) for p in (folder / "packed").glob("*.tar"))[rank::ranks]
    data = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False).shuffle(SHUFFLE_BUFFER)
    pairs = data.map(lambda s: (decode_image(s["npy"]), int(s["cls"])))
    return iter(pairs.batched(batch, collation_fn=torch.utils.data.default_collate))


CONTESTANTS: dict[str, Callable[[Path, int, int, int], Iterator[Batch]]] = {
    f.__name__: f for f in (packed, files, dataloader, webdataset)
}


def private_bytes() -> int:
    """Memory of this process that no other shares."""
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(r.split()[1]) for r in rows if r.startswith("Private_"))


def rank_main(pipe: Any, barrier: Any, name: str, folder: Path, ranks: int, rank: int, batch: int) -> None:
    """Read one rank's share of an epoch."""
    torch.set_num_threads(1)
    gc.collect()
    before = private_bytes()
    barrier.wait()
    start = time.perf_counter()
    batches = CONTESTANTS[name](folder, ranks, rank, batch)
    samples = labels = pixels = 0
    first = 0.0
    for x, y in batches:
        first = first or time.perf_counter() - start
        samples, labels, pixels = samples + len(y), labels + int(y.sum()), pixels + int(x[:, 0, 0, 0].sum())
    seconds = time.perf_counter() - start
    pipe.send((samples, labels, pixels, seconds, first, private_bytes() - before))


def run(name: str, folder: Path, ranks: int, batch: int, expected: tuple[int, int, int]) -> tuple[float, float, float]:
    """(samples a second, seconds to the first batch, bytes of a rank) of one epoch."""
    context = multiprocessing.get_context("fork")
    barrier, results, processes = context.Barrier(ranks), [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=rank_main, args=(theirs, barrier, name, folder, ranks, rank, batch))
        process.start()
        theirs.close()
        processes.append((process, mine))
    for process, mine in processes:
        results.append(mine.recv())
        process.join()
    sums = tuple(sum(r[k] for r in results) for k in range(3))
    if sums != expected:
        raise SystemExit(f"{name} on {ranks} ranks read {sums}, written were {expected}")
    return expected[0] / max(r[3] for r in results), max(r[4] for r in results), max(r[5] for r in results)


def make(folder: Path, samples: int, shards: int) -> tuple[tuple[int, int, int], float, float]:
    """Write the files and pack them: what they add up to, and the seconds of both."""
    start, numbers = time.perf_counter(), np.random.default_rng(0)
    labels = pixels = 0
    for i in range(samples):
        label, image = i % CLASSES, numbers.integers(0, 256, SHAPE, dtype=np.uint8)
        path = folder / "files" / f"class {label}"
        path.mkdir(parents=True, exist_ok=True)
        np.save(path / f"{i:07d}.npy", image)
        labels, pixels = labels + label, pixels + int(image[0, 0, 0])
    wrote = time.perf_counter() - start
    start = time.perf_counter()
    dl.pack(folder / "files", folder / "packed", shard_size=samples * 5200 // shards + 5200)
    return (samples, labels, pixels), wrote, time.perf_counter() - start


def drop_from_memory(folder: Path) -> None:
    """Ask the operating system to forget what it has read. What was not yet on disk is written first."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def contest(folder: Path, ranks: int, options: Any, expected: tuple[int, int, int], *, cold: bool) -> list[str]:
    """The rows of all contestants, each run once a round, in turns."""
    taken: dict[str, list[Any]] = {name: [] for name in CONTESTANTS}
    for round_ in range(options.rounds):
        names = list(CONTESTANTS)
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            if cold:
                drop_from_memory(folder / ("files" if name in ("files", "dataloader") else "packed"))
            taken[name].append(run(name, folder, ranks, options.batch, expected))
    ours, lines = [r[0] for r in taken["packed"]], []
    for name, runs in taken.items():
        rate, first, memory = (statistics.median(r[k] for r in runs) for k in range(3))
        over = ratio(ours, [r[0] for r in runs])
        promise = "" if cold else verdict(name, over)
        said = "|  |  |" if name == "packed" else f"| {over} | {promise} |"
        which = f"{ranks}, cold" if cold else ranks
        lines.append(f"| {which} | {name} | {rate:,.0f} {said} {1e3 * first:.0f} ms | {memory / 2**20:.0f} MiB |")
    return lines


def verdict(name: str, over: Ratio) -> str:
    """What the ratio says about what was promised."""
    return over.at_least(5) if name in ("files", "dataloader") else over.at_least(1)


def listed(text: str) -> list[int]:
    """The whole numbers of `1,2,4`."""
    return [int(n) for n in text.split(",") if n]


def main() -> None:
    """Write the data, run the contest for each number of ranks, print, and paste."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=256, help="samples of one rank's batch")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--cold", default="1", help="ranks that also read files dropped from memory; '' for none")
    parser.add_argument("--paste", action="store_true", help="write into docs/data.md")
    options = parser.parse_args()
    lines = ["| ranks | contestant | samples/s | packed is faster by | promised | first batch | memory of a rank |"]
    lines.append("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected, wrote, packing = make(folder, options.samples, options.shards)
        print(f"{options.samples:,} files written in {wrote:.1f} s, packed in {packing:.1f} s")
        print("\n".join(lines), flush=True)
        for ranks, cold in [(n, False) for n in listed(options.ranks)] + [(n, True) for n in listed(options.cold)]:
            rows = contest(folder, ranks, options, expected, cold=cold)
            print("\n".join(rows), flush=True)
            lines += rows
    if options.paste:
        how = (
            f"{options.samples:,} samples of 3 KiB, in memory but for the cold rows, batches of {options.batch} a "
            f"rank, {options.rounds} rounds, {os.cpu_count()} cores; packed in {packing:.1f} s; "
            f"load {os.getloadavg()[0]:.1f}"
        )
        paste("data", lines, f"{how}; pasted by `python benchmarks/data.py --paste`", PAGE)


if __name__ == "__main__":
    main()
