//! Recordings as readers see them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use convoke_recorder::Recording;
use convoke_recorder::folder::{self, FoundRecordings};
use convoke_recorder::layout::{ENTRIES, GROUPS};
use convoke_recorder::names::Names;

use super::*;

/// A folder that is removed at the end of the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("convoke-flight-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Self(std::env::temp_dir().join(name))
    }

    fn recorder(&self) -> &'static FlightRecorder {
        FlightRecorder::new(Some(self.0.clone()), None)
    }

    fn read(&self) -> FoundRecordings {
        folder::read(std::slice::from_ref(&self.0), |_| true)
    }

    fn only(&self) -> Recording {
        let FoundRecordings { mut recordings, skipped } = self.read();
        assert!(skipped.is_empty() && recordings.len() == 1, "{recordings:?} {skipped:?}");
        recordings.remove(0).1
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn call_info(seq: u64) -> CallInfo {
    let call = Call::new(CallKind::AllReduce, Dtype::F32, Some(ReduceOp::Sum), 0, 1000 + seq);
    CallInfo {
        operation: Operation::Collective,
        call,
        at_ns: now_ns(),
        seq,
        algorithm: Some(Algorithm::Ring),
        peer: None,
        to_receive_bytes: 3 * seq,
        to_send_bytes: 5 * seq,
        queued: false,
    }
}

fn of_three(recorder: &'static FlightRecorder) -> GroupRecorder {
    recorder.group("world/0.5", 7, Some(Generation::from_bytes([1; 16])), (1, 3), &[5, 6, 8])
}

#[test]
fn recorded_call_is_read_in_each_of_its_states() {
    let folder = Folder::new();
    let group_recorder = of_three(folder.recorder());
    let group = &folder.only().groups[0];
    assert_eq!((group.state, group.rank, group.size, group.id), (GroupState::Forming, 1, 3, 7));
    assert_eq!((group.name.as_str(), group.world_ranks.as_deref()), ("world/0.5", Some(&[5, 6, 8][..])));
    group_recorder.formed(Generation::from_bytes([2; 16]));
    assert_eq!(folder.only().groups[0].generation, Some(Generation::from_bytes([2; 16])));

    let first = group_recorder.begin(&call_info(41));
    let second = group_recorder.begin(&CallInfo { queued: true, ..call_info(42) });
    let read = || folder.only().entries;
    let [entry, queued] = read().try_into().unwrap();
    assert_eq!((entry.state, entry.operation, entry.seq), (State::Running, Operation::Collective, 41));
    assert_eq!((entry.thread, entry.waits_for), (nix::unistd::gettid().as_raw().cast_unsigned(), 0));
    assert_eq!(entry.enqueued_ns, entry.started_ns);
    assert_eq!((queued.state, queued.started_ns, queued.number), (State::Queued, 0, 2));
    first.wait([2, 0].into_iter(), 100, 200);
    let entry = &read()[0];
    assert_eq!((entry.listed_peers(), entry.received_bytes, entry.sent_bytes), (&[2, 0][..], 100, 200));
    first.end(true);
    second.start();
    second.wait(0..1000, 1, 2);
    let [entry, next] = read().try_into().unwrap();
    assert_eq!((entry.state, entry.received_bytes, entry.sent_bytes), (State::Done, 3 * 41, 5 * 41));
    assert!(entry.ended_ns >= entry.started_ns && next.started_ns >= entry.ended_ns);
    assert_eq!(
        (next.state, next.waits_for, next.listed_peers()),
        (State::Running, 1000, &[0, 1, 2, 3, 4, 5][..])
    );
    second.end(false);
    let entry = &read()[1];
    assert_eq!((entry.state, entry.received_bytes, entry.sent_bytes), (State::Failed, 1, 2));
    group_recorder.begin(&call_info(43)).end_immediately();
    let short = &read()[2];
    assert_eq!((short.state, short.received_bytes, short.sent_bytes), (State::Done, 3 * 43, 5 * 43));
    assert_eq!(short.ended_ns, short.started_ns);

    let recording = folder.only();
    assert_eq!(recording.names.call(&entry.call), "all_reduce(f32, 1042, sum)");
    assert_eq!(recording.names.algorithm(entry.algorithm).as_deref(), Some("ring"));
    assert_eq!(recording.header.process, process::current());
    group_recorder.failed(&Report::new(2, Cause::Timeout { missing: vec![0, 1], after_ms: 5 }));
    drop(group_recorder);
    let group = &folder.only().groups[0];
    let cause = RecordedCause { kind: CauseKind::Timeout, suspect: Some(0), reported_by: 2 };
    assert_eq!((group.state, group.cause), (GroupState::Failed, Some(cause)));
}

#[test]
fn recording_and_error_describe_calls_alike() {
    let names = Names::parse(&header(None).names);
    for kind in CallKind::ALL {
        for dtype in Dtype::ALL {
            for op in [None].into_iter().chain(ReduceOp::ALL.map(Some)) {
                let call = Call::new(kind, dtype, op, 7, 1 << 33);
                assert_eq!(names.call(&call.encode()), call.to_string());
            }
        }
    }
    for algorithm in Algorithm::ALL {
        assert_eq!(names.algorithm(algorithm as u8 + 1).as_deref(), Some(algorithm.name()));
    }
}

#[test]
fn overwritten_call_record_ignores_late_updates() {
    let folder = Folder::new();
    let group_recorder = of_three(folder.recorder());
    let early = group_recorder.begin(&call_info(0));
    let total = 3 * ENTRIES as u64;
    for seq in 1..total {
        group_recorder.begin(&call_info(seq)).end(true);
    }
    early.end(false);
    let recording = folder.only();
    let seqs: Vec<u64> = recording.entries.iter().map(|entry| entry.seq).collect();
    assert_eq!(seqs, (total - ENTRIES as u64..total).collect::<Vec<_>>());
    assert!(
        recording.entries.iter().all(|entry| entry.state == State::Done && entry.number == entry.seq + 1)
    );
    assert_eq!((recording.calls, recording.torn, recording.lost), (total, 0, 0));
}

#[test]
fn partially_written_call_is_not_read() {
    let folder = Folder::new();
    let group_recorder = of_three(folder.recorder());
    let record = group_recorder.begin(&call_info(0));
    group_recorder.begin(&call_info(1));
    // The state as if the process had been killed during the change.
    record.change(|slot| {
        slot.set(layout::entry::SEQ, 99);
        let recording = folder.only();
        assert_eq!((recording.entries.len(), recording.entries[0].seq, recording.torn), (1, 1, 1));
    });
    assert_eq!(folder.only().entries.len(), 2);
}

#[test]
fn concurrent_writers_and_a_reader_see_whole_calls() {
    const THREADS: u64 = 4;
    const CALLS: u64 = 100_000;
    let folder = Folder::new();
    let recorder = folder.recorder();
    let done = AtomicBool::new(false);
    let (reads, calls) = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..THREADS)
            .map(|thread| {
                scope.spawn(move || {
                    let group_recorder = of_three(recorder);
                    for call in 0..CALLS {
                        let record = group_recorder.begin(&call_info(THREADS * call + thread));
                        record.wait([thread as usize].into_iter(), 0, 0);
                        record.end(true);
                    }
                })
            })
            .collect();
        let reader = scope.spawn(|| {
            let mut reads = 0;
            while !done.load(Ordering::Relaxed) {
                for entry in folder.only().entries {
                    let seq = entry.seq;
                    assert_eq!((entry.to_receive_bytes, entry.to_send_bytes), (3 * seq, 5 * seq));
                    assert_eq!(entry.call, call_info(seq).call.encode());
                    assert!(entry.waits_for == 0 || u64::from(entry.peers[0]) == seq % THREADS, "{entry:?}");
                }
                reads += 1;
            }
            reads
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        done.store(true, Ordering::Relaxed);
        (reader.join().unwrap(), folder.only())
    });
    assert!(reads > 0);
    assert_eq!((calls.calls + calls.lost, calls.torn), (THREADS * CALLS, 0));
    // Two threads meet in a slot only if one was delayed for a whole round of the ring.
    assert!(
        calls.entries.len() as u64 + calls.lost >= ENTRIES as u64,
        "{} {}",
        calls.entries.len(),
        calls.lost
    );
}

#[test]
fn calls_are_numbered_on_although_a_slow_thread_sets_the_count_back() {
    let folder = Folder::new();
    let recorder = folder.recorder();
    let (group_recorder, total) = (of_three(recorder), 3 * ENTRIES as u64 + 100);
    let record = |seqs: std::ops::Range<u64>| seqs.for_each(|seq| drop(group_recorder.done(&call_info(seq))));
    record(0..total);
    for (more, back) in [(0, total), (1, 1), (2, 2 * ENTRIES as u64)] {
        recorder.ring.set_count(total + more - back);
        record(total + more..total + more + 1);
        let recording = folder.only();
        let last = recording.entries.last().unwrap();
        assert_eq!((last.number, last.seq), (total + more + 1, total + more), "set back by {back}");
        assert_eq!((recording.calls, recording.lost, recording.entries.len()), (last.number, 0, ENTRIES));
    }
}

#[test]
fn ended_groups_free_slots_and_excess_groups_still_work() {
    let folder = Folder::new();
    let recorder = folder.recorder();
    let first = of_three(recorder);
    for _ in 0..3 * GROUPS {
        drop(of_three(recorder));
    }
    let groups = folder.only().groups;
    assert_eq!(groups.len(), GROUPS);
    assert_eq!((groups[0].number, groups[0].state), (1, GroupState::Forming));
    let newest = groups.last().unwrap();
    assert_eq!((newest.number, newest.state), (3 * GROUPS as u32 + 1, GroupState::Unformed));
    let many: Vec<GroupRecorder> = (0..GROUPS).map(|_| of_three(recorder)).collect();
    let without_room = many.last().unwrap();
    without_room.formed(Generation::from_bytes([1; 16]));
    without_room.begin(&call_info(3)).end(true);
    let recording = folder.only();
    let entry = recording.entries.last().unwrap();
    assert_eq!((entry.seq, entry.state, recording.group(entry.group)), (3, State::Done, None));
    drop((first, many));
}

/// Asserts a condition in a forked child. The condition takes no lock that another thread may have held at
/// the fork.
#[allow(unsafe_code)]
fn assert_in_a_child(is_true: impl FnOnce() -> bool) {
    // SAFETY: the child takes no such lock, may allocate, which glibc allows after a fork, and ends with
    // _exit.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            let code = i32::from(!is_true());
            // SAFETY: ends the process at once.
            unsafe { nix::libc::_exit(code) };
        }
        nix::unistd::ForkResult::Parent { child } => {
            let status = nix::sys::wait::waitpid(child, None).unwrap();
            assert!(matches!(status, nix::sys::wait::WaitStatus::Exited(_, 0)), "{status:?}");
        }
    }
}

#[test]
fn forked_child_does_not_write_the_recording_of_its_parent() {
    let folder = Folder::new();
    let group_recorder = of_three(folder.recorder());
    let record = group_recorder.begin(&call_info(1));
    let mut kept = Some(group_recorder);
    assert_in_a_child(|| {
        record.end(true);
        kept.take().is_some_and(|group_recorder| group_recorder.begin(&call_info(2)).number.is_none())
    });
    let recording = folder.only();
    assert_eq!((recording.entries.len(), recording.calls), (1, 1));
    assert_eq!(
        (recording.entries[0].state, recording.groups[0].state),
        (State::Running, GroupState::Forming)
    );
}

#[test]
fn forked_child_recognises_its_own_threads() {
    of_three(FlightRecorder::new(None, None)).begin(&call_info(1)).end(true);
    // `FlightRecorder::for_process` also does this in a child.
    assert_in_a_child(|| {
        let ring = &FlightRecorder::new(None, None).ring;
        ring.thread_id() == nix::unistd::gettid().as_raw().cast_unsigned()
    });
}

#[test]
fn call_changing_during_a_save_is_whole_or_absent() {
    let recorder = FlightRecorder::new(None, None);
    let (group_recorder, done) = (of_three(recorder), AtomicBool::new(false));
    let recordings: Vec<_> = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut made = 0;
            while !done.load(Ordering::Relaxed) {
                made += 1;
                group_recorder.begin(&call_info(made)).end(true);
            }
        });
        let recordings = (0..200).map(|_| Recording::decode(&recorder.ring.bytes())).collect();
        done.store(true, Ordering::Relaxed);
        recordings
    });
    for entry in recordings.iter().flat_map(|recording| &recording.as_ref().unwrap().entries) {
        assert_eq!((entry.to_receive_bytes, entry.to_send_bytes), (3 * entry.seq, 5 * entry.seq));
        let done = if entry.state == State::Done { entry.to_receive_bytes } else { 0 };
        assert_eq!(entry.received_bytes, done, "{entry:?}");
    }
}

#[test]
fn recording_without_a_file_is_saved_at_each_group_failure() {
    let folder = Folder::new();
    let header = header(None);
    let (words, file) = RecordingFile::in_memory(Some(folder.0.clone()), "rank-3.77".to_owned());
    let recorder = FlightRecorder::with_memory(words, file, &header);
    let group_recorder = of_three(recorder);
    group_recorder.begin(&call_info(1)).end(false);
    assert!(!folder.0.exists());
    group_recorder.save();
    assert_eq!(folder.only().entries.len(), 1);
    group_recorder.begin(&call_info(2)).end(false);
    group_recorder.save();
    assert_eq!(folder.only().entries.len(), 2);
    assert_eq!(folder.read().recordings[0].0.file_name().unwrap(), "rank-3.77.flight");
}

#[test]
fn unwritable_folder_is_ignored() {
    for folder in ["/dev/null/folder", "/proc/self", "/proc/no/such"] {
        let recorder = FlightRecorder::new(Some(PathBuf::from(folder)), None);
        let group_recorder = of_three(recorder);
        group_recorder.begin(&call_info(1)).end(false);
        group_recorder.save();
        assert!(Recording::decode(&recorder.ring.bytes()).unwrap().entries.len() == 1);
        assert!(folder::read(&[Path::new(folder).to_owned()], |_| true).recordings.is_empty());
    }
}

#[test]
fn two_recorders_of_one_process_use_separate_files() {
    let folder = Folder::new();
    let tracks = [of_three(folder.recorder()), of_three(folder.recorder())];
    assert_eq!(folder.read().recordings.len(), 2);
    drop(tracks);
}
