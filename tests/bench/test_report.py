import json
import os

import pytest

from megaenc.bench import report
from megaenc.errors import InputError
from megaenc.processes import WorkerDied, python_environment


def test_machine_is_this_one_and_goes_into_json():
    results = report.describe_machine()
    assert results["cores"] == len(os.sched_getaffinity(0))
    assert results["memory_gib"] > 0 and results["processor"]
    assert results["packages"]["numpy"]
    assert json.loads(json.dumps(results)) == results


def test_spread():
    assert report.summarize([3.0, 1.0, 2.0, 10.0]) == {"median": 2.5, "lowest": 1.0, "highest": 10.0}
    assert report.summarize([4.0]) == {"median": 4.0, "lowest": 4.0, "highest": 4.0}


def test_written_whole_into_a_folder_that_is_made(tmp_path):
    path = tmp_path / "new" / "bench.json"
    report.write_report(path, {"a": [1, 2]})
    assert json.loads(path.read_text()) == {"a": [1, 2]}
    with pytest.raises(TypeError):
        report.write_report(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": [1, 2]} and len(list(path.parent.iterdir())) == 1


def test_a_place_that_cannot_be_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--output .*file/bench.json: cannot create the folder"):
        report.write_report(tmp_path / "file" / "bench.json", {})


def test_what_a_process_that_dies_printed_is_in_the_error():
    code = "import os; print('last words', flush=True); os._exit(3)"
    with (
        pytest.raises(WorkerDied, match=r"ended with exit code 3\nlast words"),
        report.run_workers(exec, code, python_environment()) as [worker],
    ):
        list(worker.results())
