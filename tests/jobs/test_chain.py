"""Whether another job follows: the table of exit codes and of what SLURM says, and chain.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.jobs.chain import REQUEUE, Chain, Link, Standing, decide, standing_of

pytestmark = pytest.mark.cpu

RUNNING, LIMIT, PREEMPTED = Standing.RUNNING, Standing.TIME_LIMIT, Standing.PREEMPTED
# Of `scontrol show job` in 22.05, from a job's own script at its end.
COMPLETING = {"JobState": "COMPLETING", "Reason": "None", "Restarts": "0", "PreemptTime": "None"}


@pytest.mark.parametrize(
    ("fields", "restart", "expected"),
    [
        ({"JobState": "RUNNING", "Reason": "None", "Restarts": "0", "PreemptTime": "None"}, 0, Standing.RUNNING),
        ({"JobState": "RUNNING", "Restarts": "0", "PreemptTime": "2026-11-28T23:33:04"}, 0, Standing.PREEMPTED),
        ({**COMPLETING, "Reason": "TimeLimit"}, 0, Standing.TIME_LIMIT),
        ({"JobState": "TIMEOUT", "Reason": "TimeLimit", "Restarts": "0"}, 0, Standing.TIME_LIMIT),
        (COMPLETING, 0, Standing.CANCELLED),
        ({"JobState": "CANCELLED", "Reason": "None", "Restarts": "2"}, 2, Standing.CANCELLED),
        ({**COMPLETING, "Restarts": "1"}, 0, Standing.REQUEUED),
        ({"JobState": "PENDING", "Reason": "BeginTime", "Restarts": "3"}, 2, Standing.REQUEUED),
        ({"JobState": "RUNNING", "Reason": "None", "Restarts": "3", "PreemptTime": "None"}, 3, Standing.RUNNING),
        ({**COMPLETING, "JobState": "NODE_FAIL", "Reason": "NodeDown"}, 0, Standing.LOST_NODE),
    ],
)
def test_what_slurm_says_of_the_job(fields: dict[str, str], restart: int, expected: Standing) -> None:
    assert standing_of(fields, restart) is expected


# code, standing, progressed, failures before -> goes on, failures now
TABLE = [
    (0, RUNNING, True, 0, False, 0),
    (0, PREEMPTED, True, 0, False, 0),
    (2, RUNNING, False, 0, False, 0),
    (4, RUNNING, True, 0, False, 0),
    (6, RUNNING, True, 0, False, 0),
    (130, RUNNING, True, 0, False, 0),
    (3, RUNNING, True, 2, True, 0),
    (3, LIMIT, True, 0, True, 0),
    (3, PREEMPTED, True, 1, True, 0),
    (3, LIMIT, False, 0, True, 1),  # a limit that leaves no time for a checkpoint
    (3, LIMIT, False, 2, False, 3),
    (3, PREEMPTED, False, 2, True, 2),  # not the run's fault
    (5, RUNNING, True, 2, True, 1),
    (5, RUNNING, False, 0, True, 1),
    (5, RUNNING, False, 1, True, 2),
    (5, RUNNING, False, 2, False, 3),
    (1, RUNNING, False, 2, False, 3),
    (1, RUNNING, True, 2, True, 1),
    (143, LIMIT, True, 0, True, 1),  # a run that saves nothing at a signal
    *((code, Standing.CANCELLED, True, 0, False, 0) for code in (0, 1, 3, 5)),
    (5, Standing.LOST_NODE, False, 0, True, 1),
]


@pytest.mark.parametrize(("code", "standing", "progressed", "before", "goes_on", "failures"), TABLE)
def test_the_decision(
    code: int, standing: Standing, progressed: bool, before: int, goes_on: bool, failures: int
) -> None:
    found = decide(code, standing, progressed=progressed, in_a_row=before, count=4)
    assert (found.goes_on, found.in_a_row) == (goes_on, failures), found


def test_limits_and_the_stop_file_end_a_chain() -> None:
    def follows(code: int = 3, count: int = 29, **options: object) -> bool:
        return decide(code, RUNNING, progressed=True, in_a_row=0, count=count, **options).goes_on

    assert follows() and not follows(count=30) and not follows(count=31)
    assert not follows(count=1, most=1) and follows(count=1, most=2)
    assert not follows(stop_asked=True) and not follows(5, stop_asked=True)
    assert not decide(5, RUNNING, progressed=True, in_a_row=0, count=1, most_failures=1).goes_on


def linked(*links: Link, **options: object) -> Chain:
    return Chain(links, **options)


def test_a_requeued_job_and_a_successor_continue_a_chain_and_others_begin_one() -> None:
    one = Chain().begin("12", 0, 100.0, "a[1-2]", 0)
    assert [(link.job_id, link.count) for link in one.links] == [("12", 1)]
    ended = replace(one.end(ended=150.0, code=3, step=40, next=REQUEUE), in_a_row=1, excluded=("a9",))
    assert ended.continues("12", 1) and not ended.continues("12", 0) and not ended.continues("13", 0)
    two = ended.begin("12", 1, 200.0, "a[1-2]", 40)
    assert [(link.count, link.next) for link in two.links] == [(1, REQUEUE), (2, None)]
    assert (two.in_a_row, two.excluded, two.first_job) == (1, ("a9",), "12")
    three = two.end(ended=250.0, code=3, next="13").begin("13", 0, 300.0, "a3", 50)
    assert (three.last.count, three.first_job) == (3, "12")
    again = three.end(ended=350.0, code=3).begin("20", 0, 400.0, "a3", 60)  # submitted by the user
    assert (again.last.count, again.in_a_row, again.excluded, again.first_job) == (1, 0, (), "20")
    assert len(again.links) == 4


def test_a_start_of_which_nothing_was_left_is_completed_by_the_next() -> None:
    """Preemption without grace, and a node that is gone: SLURM requeues the job."""
    killed = replace(Chain().begin("12", 0, 100.0, "a1", 10), in_a_row=2)
    nowhere, further = killed.begin("12", 1, 200.0, "a1", 10), killed.begin("12", 1, 200.0, "a1", 30)
    assert (nowhere.in_a_row, further.in_a_row) == (2, 0)
    first, second = further.links
    assert (first.ended, first.code, first.next, first.step, second.count) == (None, None, REQUEUE, 30, 2)
    assert first.reason


def test_a_lost_chain_file_does_not_lose_the_count_of_a_successor() -> None:
    assert Chain().begin("13", 0, 1.0, "a1", 0, before=7).last.count == 8


def test_a_chain_file_that_never_survives_does_not_make_a_chain_without_end() -> None:
    """`save` on the disk of a node, a damaged file: SLURM's own count of requeues is left."""
    lost = Chain().begin("12", 4, 1.0, "a1", 0, before=2)
    assert (lost.last.count, lost.in_a_row, lost.first_job) == (5, 4, "12")
    assert Chain().begin("12", 4, 1.0, "a1", 50).in_a_row == 0  # only the file was damaged
    earlier = Chain().begin("9", 0, 1.0, "a1", 0).end(ended=2.0, code=0)
    assert earlier.begin("12", 1, 3.0, "a1", 0).first_job == "12"  # count 2 after 1, and yet another chain


def test_a_node_is_left_when_it_failed_twice_in_this_chain() -> None:
    def failed(count: int, node: str | None) -> Link:
        return Link("1", 0, count, 0.0, failed_node=node)

    assert linked(failed(1, "a1"), failed(2, "a2"), failed(3, "a1")).failing_nodes() == ("a1",)
    assert linked(failed(1, "a1"), failed(2, "a1"), excluded=("a1",)).failing_nodes() == ()
    earlier = linked(failed(1, "a1"), failed(2, None), failed(1, "a1"))
    assert earlier.failing_nodes() == ()


def test_chain_json_is_read_back_and_a_damaged_one_begins_a_new_chain(tmp_path: Path) -> None:
    chain = Chain().begin("12", 0, 100.5, "a1", 0).end(ended=150.25, code=5, failed_node="a1", next=REQUEUE)
    chain.write(tmp_path)
    written = json.loads((tmp_path / "chain.json").read_text())
    assert written["version"] == 1
    assert {"job_id", "restart", "started", "ended", "code", "nodes", "reason", "next"} <= written["links"][0].keys()
    assert Chain.read(tmp_path) == chain
    written["links"][0]["of a newer version"] = 1
    (tmp_path / "chain.json").write_text(json.dumps(written))
    assert Chain.read(tmp_path) == chain
    for text in ("{", "[]", '{"links": [{}]}', '{"links": 3, "in_a_row": 0, "excluded": []}', ""):
        (tmp_path / "chain.json").write_text(text)
        assert Chain.read(tmp_path) == Chain()
    assert Chain.read(tmp_path / "missing") == Chain()
