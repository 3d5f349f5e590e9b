import subprocess
import sys

from megaenc.atomic_io import try_lock


def test_a_lock_is_one_s_own_until_it_is_let_go(tmp_path):
    path = tmp_path / "directory" / "lock"
    with try_lock(path) as first, try_lock(path) as second:
        assert first and not second and path.exists()
    assert not path.exists()
    with try_lock(path) as again:
        assert again


def test_a_lock_ends_with_the_process_that_is_killed(tmp_path):
    path = tmp_path / "lock"
    code = "import sys, time; from pathlib import Path; from megaenc.atomic_io import try_lock\n"
    code += "with try_lock(Path(sys.argv[1])) as mine: print(mine, flush=True); time.sleep(60)"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "True\n"
        with try_lock(path) as mine:
            assert not mine
    finally:
        holder.kill()
        holder.communicate()
    with try_lock(path) as mine:
        assert mine
