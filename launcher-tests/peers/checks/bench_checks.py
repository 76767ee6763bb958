#!/usr/bin/env python3
"""Measures what each check of a short call costs: builds of convoke-perf in which one check is removed, interleaved.

  bench_checks.py --out target/bench/checks [--rounds 21] [--ranks 2] [--only NAME,...]
  bench_checks.py --verify        # only whether each removal still finds its text in the sources

A removal replaces exact text in a copy of the tracked sources. Each round runs all builds once, beginning with another one
each time. The cost of a check is the time of the whole build less that of the build without the check, in one round; the table
has the median of the rounds and the middle half of them. A build without a check is of no other use: it may hang or return
wrong data where the check would have reported an error.
"""
import argparse
import csv
import os
import shutil
import statistics
import subprocess
import sys

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../.."))
COMM = "src/comm"
OPERATIONS = ("send_recv", "all_reduce", "barrier")

NO_CLOCK = (
    f"{COMM}/flight/clock.rs",
    "    CLOCK.with(|clock| clock.get().at(counter()).unwrap_or_else(|| read(clock)))\n",
    "    CLOCK.with(|clock| if cfg!(test) { clock.get().at(counter()).unwrap_or_else(|| read(clock)) } else { 1 })\n",
)

# Name: (the check, [(file, text, its replacement)]).
REMOVALS = {
    "mismatch": (
        "mismatch: publish and compare the description of each call and the digest of earlier calls; type and tag of messages",
        [
            (
                f"{COMM}/shm/announcements.rs",
                """        match self.header(rank, number) {
            None => Ok(false),
            Some(theirs) if theirs == *ours => Ok(true),
            Some(theirs) => Err(self.mismatch(rank, number, theirs, seq)),
        }
""",
                """        let _ = (ours, seq);
        let stamp = self.segment.word(self.layout.slot(rank, number)).load(Ordering::Acquire);
        if stamp as u32 == number {
            self.peers.started[rank] = number;
        }
        Ok(stamp as u32 == number)
""",
            ),
            (
                f"{COMM}/shm/announcements.rs",
                """        self.segment.view(slot + CALL_OFFSET, 16).write(&header.call);
        self.segment.view(slot + HISTORY_OFFSET, 8).write(&header.history.to_le_bytes());
""",
                "",
            ),
            (f"{COMM}/shm/numbering.rs", "        self.history = header.digest();\n", ""),
            (
                f"{COMM}/engine/messages/queues.rs",
                "    if (theirs.kind, theirs.dtype, theirs.root) == (ours.kind, ours.dtype, ours.root) {\n",
                "    if seq < u64::MAX {\n",
            ),
        ],
    ),
    "recorder": (
        "flight recorder: one record of each call, with the time",
        [
            (
                f"{COMM}/flight/mod.rs",
                """        let mut entry = self.entry(info);
        (entry.state, entry.ended_ns) = (State::Done, entry.enqueued_ns);
        (entry.received_bytes, entry.sent_bytes) = (info.to_receive_bytes, info.to_send_bytes);
        self.recorder.ring.add(&entry);
        if !self.recorder.ring.is_own_process() {
            full_fence();
        }
""",
                # The wake-up of sleeping ranks needs the fence that an entry is.
                "        let _ = info;\n        full_fence();\n",
            ),
            (f"{COMM}/flight/mod.rs", "number: ring.add(&entry), tags,", "number: None, tags,"),
            NO_CLOCK,
        ],
    ),
    "clock": (
        "of that the time: one reading of the processor's counter",
        [
            NO_CLOCK,
        ],
    ),
    "sleepers": (
        "wake-up: a fence, and the bits of the ranks that sleep",
        [
            (f"{COMM}/shm/doorbells.rs", "        full_fence();\n        self.wake_all_marked();\n", "        self.wake_all_marked();\n"),
            (
                f"{COMM}/shm/doorbells.rs",
                "    pub(crate) fn wake_all_marked(&self) {\n",
                "    pub(crate) fn wake_all_marked(&self) {}\n\n    fn wake_everyone(&self) {\n",
            ),
            (f"{COMM}/shm/doorbells.rs", "        if sleeping_ranks(self.segment.word(at)) & bit != 0 {\n", "        if at == usize::MAX && bit != 0 {\n"),
            # A rank that others do not wake would sleep for ever: each rank wakes all before it sleeps itself.
            (
                f"{COMM}/shm/doorbells.rs",
                "    pub(crate) fn mark_sleeping(&self) {\n",
                "    pub(crate) fn mark_sleeping(&self) {\n        self.wake_everyone();\n",
            ),
        ],
    ),
    "state": (
        "state of the group: failed on another rank, left, calls that are queued, aborts of other threads",
        [
            (
                f"{COMM}/engine/fast_path/conditions.rs",
                """        self.failure.is_none()
            && !self.lifecycle.left
            && self.collectives.queue.is_empty()
            && self.host.memory.as_ref().is_none_or(|node| !node.has_failed())
            && !self.submissions.has_submissions()
""",
                "        self.host.memory.is_some()\n",
            ),
        ],
    ),
    "room": (
        "room: the slot of the call, or a cell for the message, is free on all ranks",
        [
            (f"{COMM}/shm/small_call.rs", " && self.is_next_slot_free();", ";"),
            (
                f"{COMM}/shm/cells.rs",
                "        let most = self.outgoing.count;\n",
                "        let most = self.outgoing.count;\n        if self.filled < u64::MAX {\n            return Ok(true);\n        }\n",
            ),
            (
                f"{COMM}/shm/cells.rs",
                "        self.update_peer_emptied(segment.word(at + EMPTIED_OFFSET).load(Ordering::Relaxed))?;\n",
                "",
            ),
            (f"{COMM}/shm/cells.rs", "        segment.word(at + EMPTIED_OFFSET).store(self.emptied, Ordering::Relaxed);\n", ""),
        ],
    ),
    "periodic": (
        "counters of inline calls: when to poll events, and on which core this thread runs",
        [
            (
                f"{COMM}/engine/fast_path/conditions.rs",
                "        if self.driver.rounds.is_multiple_of(calls_between_polls) {\n",
                "        if self.driver.rounds == 0 {\n",
            ),
            (
                f"{COMM}/engine/fast_path/conditions.rs",
                "        if self.driver.rounds.is_multiple_of(calls_between_core_checks) {\n",
                "        if self.driver.rounds == 0 && calls_between_core_checks > 0 {\n",
            ),
        ],
    ),
    "lock": (
        "threads: the lock of the engine, and the threads that wait for it",
        [
            (
                f"{COMM}/engine/exclusive.rs",
                "self.flags.0.fetch_or(LOCKED, Ordering::SeqCst) & LOCKED != 0;\n",
                "{ self.flags.0.store(self.flags.get() | LOCKED, Ordering::Relaxed); false };\n",
            ),
            (
                f"{COMM}/engine/exclusive.rs",
                "        self.0.0.fetch_and(!LOCKED, Ordering::SeqCst);\n",
                "        self.0.0.store(self.0.get() & !LOCKED, Ordering::Relaxed);\n",
            ),
            (
                f"{COMM}/engine/progress_lock.rs",
                "        if self.0.submissions.lock_released()\n",
                "        if self.0.callers.load(Ordering::Relaxed) == usize::MAX && self.0.submissions.lock_released()\n",
            ),
        ],
    ),
    "caller": (
        "caller: the group lives, this is no forked child and no reduction function, the rank exists",
        [
            (
                f"{COMM}/api/group/mod.rs",
                "        if self.destroyed.load(Ordering::Relaxed) {\n",
                "        if self.pid != 0 {\n            return Ok(());\n        }\n        if self.destroyed.load(Ordering::Relaxed) {\n",
            ),
            (f"{COMM}/api/group/prepare.rs", "        require(rank < self.size(), ||", "        require(rank < usize::MAX, ||"),
        ],
    ),
}
# Without each of them; the recorder's removal has the clock's.
ALL = "all"


def edits(names):
    """The edits of these removals, each once."""
    return list(dict.fromkeys(edit for name in names for edit in REMOVALS[name][1]))


def verify():
    """Returns a line for each text that does not occur exactly once in its file."""
    wrong = []
    for name in REMOVALS:
        for path, old, _ in REMOVALS[name][1]:
            found = open(os.path.join(ROOT, path)).read().count(old)
            if found != 1:
                wrong.append(f"{name}: found {found} times in {path}, not once: {old.strip().splitlines()[0]}")
    return wrong


def build(out, name):
    """Builds convoke-perf without the check `name` (all of them, or none for an empty name); returns its path."""
    source = os.path.join(out, "source")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    changed = {}
    for path, old, new in edits(key for key in REMOVALS if name in (key, ALL)):
        changed[path] = changed.get(path, open(os.path.join(ROOT, path)).read()).replace(old, new)
    for path in filter(None, tracked.split("\0")):
        to = os.path.join(source, path)
        text = changed[path].encode() if path in changed else open(os.path.join(ROOT, path), "rb").read()
        # Cargo builds what is newer than its last result, so only files that change are written.
        if not os.path.exists(to) or open(to, "rb").read() != text:
            os.makedirs(os.path.dirname(to), exist_ok=True)
            open(to, "wb").write(text)
            shutil.copymode(os.path.join(ROOT, path), to)
    env = {**os.environ, "CARGO_TARGET_DIR": os.path.join(out, "target"), "RUSTFLAGS": "--cap-lints allow"}
    command = ["cargo", "build", "--quiet", "--release", "--locked", "-p", "convoke", "-p", "convoke-tools"]
    subprocess.run(command, cwd=source, env=env, check=True)
    to = os.path.join(out, f"perf-{name or 'whole'}")
    shutil.copy2(os.path.join(out, "target/release/convoke-perf"), to)
    return to


def measure(launcher, perf, ranks, o):
    """Medians in nanoseconds, by operation."""
    command = [launcher, "--standalone", f"--nproc-per-node={ranks}", perf, ",".join(OPERATIONS), "--csv", "--rewrite"]
    command += ["--min-bytes", "4", "--max-bytes", "4", "--time-ms", str(o.time_ms), "--max-iters", "1000000"]
    env = {**os.environ, "CONVOKE_SHM": "on"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    if done.returncode:
        sys.exit(f"{perf} failed: {done.stderr[-600:]}")
    rows = [line.split(",") for line in done.stdout.splitlines()]
    return {row[2]: float(row[7]) * 1e3 for row in rows if len(row) == 11 and row[2] in OPERATIONS}


def table(rounds, names):
    """The table as Markdown."""
    lines = ["| check | " + " | ".join(OPERATIONS) + " |", "|---" * (len(OPERATIONS) + 1) + "|"]
    whole = [f"{statistics.median(r[''][op] for r in rounds):.0f} ns" for op in OPERATIONS]
    lines.append("| the whole call | " + " | ".join(whole) + " |")
    for name in names:
        cells = []
        for op in OPERATIONS:
            costs = sorted(r[""][op] - r[name][op] for r in rounds)
            quarter = len(costs) // 4
            cells.append(f"{statistics.median(costs):.0f} ({costs[quarter]:.0f} to {costs[-1 - quarter]:.0f})")
        lines.append(f"| {'all of them' if name == ALL else REMOVALS[name][0]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", default="target/bench/checks")
    p.add_argument("--rounds", type=int, default=21)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--time-ms", type=float, default=100, help="timed loop per operation, about")
    p.add_argument("--only", default="", help="comma list of removals")
    p.add_argument("--verify", action="store_true", help="only find the texts of all removals in the sources")
    o = p.parse_args()
    wrong = verify()
    if wrong or o.verify:
        sys.exit("\n".join(wrong) and "bench_checks.py: text of a removal is not in its file:\n" + "\n".join(wrong) or 0)
    names = [name for name in [*REMOVALS, ALL] if not o.only or name in o.only.split(",")]
    out = os.path.abspath(o.out)
    os.makedirs(out, exist_ok=True)
    builds = {name: build(out, name) for name in ["", *names]}
    launcher = os.path.join(out, "target/release/convoke")
    order, rounds = list(builds), []
    with open(os.path.join(out, "raw.csv"), "w") as file:
        raw = csv.writer(file)
        raw.writerow(["round", "without", "operation", "ns"])
        for number in range(o.rounds):
            turn = number % len(order)
            got = {name: measure(launcher, builds[name], o.ranks, o) for name in order[turn:] + order[:turn]}
            raw.writerows([number, name, op, f"{ns:.1f}"] for name in got for op, ns in got[name].items())
            rounds.append(got)
    text = table(rounds, names)
    open(os.path.join(out, "table.md"), "w").write(text + "\n")
    print(text)


main()
