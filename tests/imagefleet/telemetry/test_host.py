from imagefleet.telemetry import host


def test_the_memory_of_a_container_counts_not_the_machines_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "_CONTROL_GROUP", tmp_path)
    of_machine = host.free_memory_bytes()
    assert of_machine > 0
    (tmp_path / "memory.max").write_text("max\n")
    assert host.free_memory_bytes() > of_machine / 2, "no limit"
    assert host.memory_bytes() >= of_machine
    (tmp_path / "memory.max").write_text("10000000\n")
    assert host.memory_bytes() == 10_000_000
    (tmp_path / "memory.current").write_text("9000000\n")
    (tmp_path / "memory.stat").write_text(
        "anon 5000000\nactive_file 500000\ninactive_file 20000\n"
    )
    assert host.free_memory_bytes() == 1_520_000
