from pagetile.device import _left_by_limits


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


def test_a_container_s_limits_count(tmp_path):
    write(tmp_path / "pod", max="1000\n", current="300\n", stat="inactive_file 50\n")
    write(tmp_path / "pod" / "one", max="max\n", current="200\n", stat="inactive_file 0\n")
    assert _left_by_limits(tmp_path, "0::/pod/one\n") == [750]


def test_so_do_those_of_the_first_version(tmp_path):
    stat = "inactive_file 1\ntotal_inactive_file 100\n"
    write(tmp_path / "memory", limit_in_bytes="900", usage_in_bytes="1200", stat=stat)
    # Seen from within, the path is the host's.
    own = "5:cpu:/docker/ab\n4:memory:/docker/ab\n0::/\n"
    assert _left_by_limits(tmp_path, own) == [0]
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("600")
    assert _left_by_limits(tmp_path, own) == [400]


def test_without_limits_there_are_none(tmp_path):
    assert _left_by_limits(tmp_path, "0::/\n") == []
    assert _left_by_limits(tmp_path, "") == []
    assert all(left >= 0 for left in _left_by_limits())
