"""Writing of corpora in partitions by one process or many: each takes unclaimed partitions, one merges, the others wait."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from megaenc.console import ProgressLine, print_rank_0
from megaenc.data.indexed.indexed_dataset import IndexedWriter
from megaenc.data.indexed.metadata import CorpusMetadata, read_corpus_metadata
from megaenc.data.preprocess.claims import Claim
from megaenc.data.preprocess.job import Counts, PreprocessJob
from megaenc.data.preprocess.outputs import output_files, refuse_finished_outputs, refuse_foreign_outputs
from megaenc.data.preprocess.resumable import BandKeys, PartitionExists, PartitionStore, read_merge_record
from megaenc.data.preprocess.worker import TokenizedBlock
from megaenc.data.sources import resolve
from megaenc.errors import InputError
from megaenc.output_paths import report_stale_files

POLL_SECONDS = 2.0
"""Maximum seconds between two looks at the claims of other processes while there is nothing else to do."""
_FIRST_POLL_SECONDS = 0.05  # doubled after each look
_SCAN_SECONDS = 5.0  # between two looks at the progress of others
_SCAN_SHARE = 50  # and at least so many times as long as a look takes


def write_in_partitions(job: PreprocessJob, folder: Path) -> list[CorpusMetadata]:
    """Write the missing partitions that no other process writes, merge all unless another process does; return the metadata."""
    ranges = resolve.partition_inputs(job.inputs, job.settings.partitions)
    if len(ranges) < job.settings.partitions:
        print_rank_0(f"--partitions {job.settings.partitions}: the input can be split into at most {len(ranges)} partitions")
    tokenizer = job.block_tokenizer
    store = PartitionStore(
        folder, job.build_plan(), job.settings.json_keys, tokenizer.dtype, len(ranges), tokenizer.deduplication
    )
    while True:
        store.open()
        try:
            write_missing(job, store, ranges)
            return merge_partitions(job, store)
        except BaseException as error:
            if isinstance(error, InputError | OSError) and store.is_gone():
                if all(path.exists() for path in output_files(job.prefixes)):
                    print_rank_0(f"{folder}: another process has merged the partitions")
                    return [read_corpus_metadata(prefix) for prefix in job.prefixes]
                continue  # it stopped before the first partition, or somebody removed the folder
            if done := store.leave():
                alternative = "" if done < len(ranges) else ", or remove the folder"
                print_rank_0(
                    f"{folder}: {done} of {len(ranges)} partitions are done; run the same command to resume{alternative}"
                )
            raise


class SharedProgress:
    """Progress line over the partitions of all processes; `sizes` are those of the partitions in bytes."""

    def __init__(self, store: PartitionStore, sizes: Sequence[float], line: ProgressLine) -> None:
        self._store, self._sizes, self._line = store, sizes, line
        self._next_scan = 0.0
        self._scan()

    def _scan(self) -> None:
        """Read which partitions are done and which are claimed, unless that was done shortly before."""
        started = time.monotonic()
        if started >= self._next_scan:
            self._complete, self._claimed = self._store.read_progress()
            now = time.monotonic()
            self._next_scan = now + max(_SCAN_SECONDS, _SCAN_SHARE * (now - started))

    def update(self, number: int | None = None, done: float = 0.0, description: str = "tokenizing", **fields: float) -> None:
        """Show the progress of all, `done` bytes of partition `number` being this process's; None: it writes none."""
        self._scan()
        claimed = {each: amount for each, amount in self._claimed.items() if each is not None and each not in self._complete}
        if number is not None:
            claimed[number] = done
        self._line.update(
            sum(self._sizes[each] for each in self._complete)
            + sum(min(max(amount, 0.0), self._sizes[each]) for each, amount in claimed.items()),
            description=description,
            partitions=f"{len(self._complete)}/{len(self._sizes)}",
            processes=len(claimed) or 1,  # between two claims
            **fields,
        )

    def complete(self, number: int) -> None:
        """Count partition `number` as done."""
        self._complete.add(number)
        self.update()


def write_missing(job: PreprocessJob, store: PartitionStore, ranges: list[list[resolve.DocumentRange]]) -> None:
    """Write missing partitions that no other process claims, until all are done; FileNotFoundError if the folder is gone."""
    missing = store.missing_partitions()
    # Outputs with the recorded hashes may be overwritten; others may come from a process that has just finished here.
    try:
        refuse_foreign_outputs(job.prefixes, read_merge_record(store.folder))
    except InputError:  # a merge may have begun between the reading of the record and the look at the outputs
        if not (recorded := read_merge_record(store.folder)):
            refuse_finished_outputs(job.prefixes)
        refuse_foreign_outputs(job.prefixes, recorded)
    if len(missing) < store.count:
        print_rank_0(f"{store.folder}: {store.count - len(missing)} of {store.count} partitions exist; writing the others")
    if not missing:
        return
    extents = [resolve.measure_ranges(job.inputs, each) for each in ranges]
    with (
        job.start_workers(job.settings.workers) as tokenize,
        ProgressLine("tokenizing", sum(size for _, size in extents)) as line,
    ):
        progress = SharedProgress(store, [size for _, size in extents], line)

        def write(number: int, claim: Claim) -> None:
            def fill(writers: list[IndexedWriter], band_keys: BandKeys) -> Counts:
                return job.tokenize_ranges(tokenize, writers, band_keys, ranges[number], report)

            def report(block: TokenizedBlock, counts: Counts, speed: float) -> None:
                claim.done = max(0.0, block.position - extents[number][0])
                progress.update(number, claim.done, **{"MB/s": round(speed, 1)})

            store.write(number, fill, partial(job.inputs.check_unchanged, ranges[number]))

        take_partitions(store, progress, missing, write)


def take_partitions(
    store: PartitionStore, progress: SharedProgress, missing: list[int], write: Callable[[int, Claim], None]
) -> None:
    """Call `write` for each partition of `missing` that this process gets, with its claim, until all are done by anybody."""
    pauses = _poll_pauses()
    while missing:
        is_waiting = True
        for number in list(missing):
            if not store.is_complete(number):
                if (claim := store.acquire(number)) is None:
                    continue
                is_waiting = False
                with claim, contextlib.suppress(PartitionExists):
                    if not store.is_complete(number):  # it may have been written before the claim
                        write(number, claim)
            missing.remove(number)
            progress.complete(number)
        if missing and is_waiting:
            if store.is_gone():
                raise FileNotFoundError(store.folder)
            progress.update(description="waiting for partitions of other processes")
            time.sleep(next(pauses))


def merge_partitions(job: PreprocessJob, store: PartitionStore) -> list[CorpusMetadata]:
    """Merge the partitions and remove the folder, or wait for another process that does; return the metadata.

    Raises FileNotFoundError if that other process has removed the folder.
    """
    with _wait_for_merge(store) as claim:

        def fill(writers: list[IndexedWriter]) -> tuple[Counts, list[int]]:
            counts, removed = store.merge(writers, claim)
            return {name: sum(each[name] for each in counts) for name in counts[0]}, removed

        def before_rename(hashes: dict[str, str]) -> None:
            if store.is_gone():
                raise FileNotFoundError(store.folder)
            # Outputs with these very hashes are of a merge that was interrupted, or overtaken during a pause.
            refuse_foreign_outputs(job.prefixes, read_merge_record(store.folder) | hashes)
            store.record_merge(hashes)

        corpora = job.write_corpora(fill, before_rename)
        store.remove()
        if claim.generation > 1:
            report_stale_files(*output_files(job.prefixes))  # of the process that began to merge before this one
    return corpora


def _wait_for_merge(store: PartitionStore) -> Claim:
    """Return the claim on the merge, waiting while another live process holds it."""
    if (claim := store.acquire(None)) is not None:
        return claim
    with ProgressLine("waiting for another process to merge", store.count_bytes(), closing=False) as line:
        for pause in _poll_pauses():
            if (claim := store.acquire(None)) is not None:
                break
            line.update(store.read_progress()[1].get(None, 0))
            time.sleep(pause)
    return claim


def _poll_pauses() -> Iterator[float]:
    """Yield the seconds to wait before each further look at the claims."""
    seconds = _FIRST_POLL_SECONDS
    while True:
        yield min(seconds, POLL_SECONDS)
        seconds = min(2 * seconds, POLL_SECONDS)
