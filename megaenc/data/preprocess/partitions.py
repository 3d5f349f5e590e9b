"""Writing of corpora in partitions, by one process or many.

Each process takes unclaimed partitions; then one merges, and the others wait.
"""

import time

from megaenc.console import ProgressLine, print_rank_0
from megaenc.data.indexed.metadata import CorpusMetadata, read_corpus_metadata
from megaenc.data.preprocess.job import Counts, PreprocessJob
from megaenc.data.preprocess.outputs import output_files, refuse_outputs
from megaenc.data.preprocess.work_directory import WorkDirectory
from megaenc.data.sources import resolve
from megaenc.errors import InputError
from megaenc.output_paths import report_stale_files

POLL_SECONDS = 2.0
"""Seconds between two looks at the claims of other processes while there is nothing else to do."""


def write_in_partitions(job: PreprocessJob) -> list[CorpusMetadata]:
    """Write the corpora of a job in partitions and return their metadata.

    These are in the order of the JSON keys. Missing partitions are written unless another process
    writes them, then all are merged unless another process does so. Any number of processes may
    call it with an equal job; each returns when the corpora exist. Progress is printed, and after
    an error how to resume.

    Raises:
        InputError: An input is bad, a directory cannot be used, or outputs exist already, as for a
            process that starts after the merge.
    """
    ranges = resolve.partition_inputs(job.inputs, job.settings.partitions)
    count = len(ranges)
    if count < job.settings.partitions:
        print_rank_0(
            f"--partitions {job.settings.partitions}: "
            f"the input can be split into at most {count} partitions"
        )
    tokenizer = job.block_tokenizer
    directory = WorkDirectory(
        job.settings.work_directory,
        job.build_plan(),
        job.settings.keys,
        tokenizer.dtype,
        count,
        tokenizer.deduplication,
    )
    while True:
        directory.open()
        try:
            refuse_outputs(job.prefixes, directory.path)
            write_missing(job, directory, ranges)
            return merge_partitions(job, directory)
        except BaseException as error:
            if isinstance(error, InputError | OSError) and directory.is_gone():
                if all(path.exists() for path in output_files(job.prefixes)):
                    print_rank_0(f"{directory.path}: another process has merged the partitions")
                    return [read_corpus_metadata(prefix) for prefix in job.prefixes]
                continue  # it stopped before the first partition, or somebody removed the directory
            if done := directory.leave():
                alternative = "" if done < count else ", or remove the directory"
                print_rank_0(
                    f"{directory.path}: {done} of {count} partitions are done; "
                    f"run the same command to resume{alternative}"
                )
            raise


def write_missing(
    job: PreprocessJob, directory: WorkDirectory, ranges: list[list[resolve.DocumentRange]]
) -> None:
    """Write missing partitions that no other process claims, until all are done.

    It also waits for those of other processes. Progress is printed.

    Args:
        directory: Work directory, which is open.
        ranges: Ranges of the input of each partition, see `resolve.partition_inputs`.

    Raises:
        FileNotFoundError: The directory is gone.
        InputError: An input is bad, or the directory cannot be written to.
    """
    missing = directory.missing_partitions()
    if len(missing) < directory.count:
        print_rank_0(
            f"{directory.path}: {directory.count - len(missing)} of {directory.count} partitions "
            "exist; writing the others"
        )
    if not missing:
        return
    sizes = [resolve.measure_ranges(job.inputs, partition)[1] for partition in ranges]
    left = {index: sizes[index] for index in missing}
    with (
        job.start_workers(job.settings.workers) as tokenize,
        ProgressLine("tokenizing", sum(sizes)) as line,
    ):

        def show(written: float = 0.0, description: str = "tokenizing", **fields: float) -> None:
            """Show the bytes and partitions done.

            Partitions are those of the last look at them, bytes those of this process's own.
            """
            partitions = f"{len(sizes) - len(left)}/{len(sizes)}"
            done = sum(sizes) - sum(left.values())
            line.update(done + written, description=description, partitions=partitions, **fields)

        def report(written: float, counts: Counts, speed: float) -> None:
            show(written, **{"MB/s": round(speed, 1)})

        while left:
            before = len(left)
            for index in list(left):
                claim = directory.acquire(index)
                if claim is None:
                    continue
                with claim:
                    if not directory.is_complete(index):  # another process may have written it
                        with directory.new_partition(index) as partition:
                            partition.counts = job.tokenize_ranges(
                                tokenize,
                                partition.writers,
                                partition.band_keys,
                                ranges[index],
                                report,
                            )
                del left[index]
                show()
            if len(left) == before:
                show(description="waiting for partitions of other processes")
                time.sleep(POLL_SECONDS)


def merge_partitions(job: PreprocessJob, directory: WorkDirectory) -> list[CorpusMetadata]:
    """Merge all partitions in `directory`, remove it and return all metadata.

    The job's corpora appear, and the metadata are in the order of their keys. While another process
    merges, it waits, and merges only if that one stops before the end.

    Raises:
        FileNotFoundError: `directory` is gone, as after the merge of another process.
        InputError: A partition is missing or has changed, outputs exist that are not of this merge,
            or a file cannot be written.
    """

    def check(hashes: dict[str, str]) -> None:
        if directory.is_gone():
            raise FileNotFoundError(directory.path)
        directory.record_merge(hashes)
        # Outputs with these hashes are of a merge that was interrupted, or overtaken in a pause.
        refuse_outputs(job.prefixes, directory.path)

    with ProgressLine("waiting for another process to merge", None, closing=False) as line:
        while (claim := directory.acquire(None)) is None:
            line.update(0)
            time.sleep(POLL_SECONDS)
    with claim:
        with job.open_outputs(check) as outputs:
            outputs.counts, outputs.removed = directory.merge(outputs.writers)
        directory.remove()
    report_stale_files(*output_files(job.prefixes))  # of a process that died while it merged
    return outputs.metadata
