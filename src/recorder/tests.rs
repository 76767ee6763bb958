//! Tests of the snapshots of several recordings, and of malformed recordings.

use convoke_env::{ExitCause, Generation};
use proptest::prelude::*;

use crate::layout::*;
use crate::process::ProcessStatus;
use crate::snapshot::{GroupSnapshot, Observer, snapshots};
use crate::*;

const SECOND: u64 = 1_000_000_000;
/// Start of every test recording: in nanoseconds since 1970, and of CLOCK_MONOTONIC.
const WALL: u64 = 1_795_249_985 * SECOND;
const BOOT: u64 = 5000 * SECOND;
const NAMES: &str = "barrier()\tall_reduce(%t, %n%o)\tsend/recv(%t, %n, tag %r)\nu8\tf32\nsum\nring";

fn barrier() -> [u8; 16] {
    [0, 0, 0xFF, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
}

fn sum(count: u8) -> [u8; 16] {
    [1, 1, 0, 0, 0, 0, 0, 0, count, 0, 0, 0, 0, 0, 0, 0]
}

fn message() -> [u8; 16] {
    [2, 1, 0xFF, 0, 7, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]
}

/// Builds a recording.
#[derive(Clone)]
struct TestRecording {
    words: Vec<u64>,
    next: u64,
    groups: u32,
}

impl TestRecording {
    fn of(rank: u32) -> Self {
        let header = Header {
            rank: Some(rank),
            world_size: Some(4),
            process: Process { pid: 100 + rank, start_ticks: 1, pid_namespace: 1, boot_id: 1 },
            generation: Some(Generation::from_bytes([3; 16])),
            started_unix_ns: WALL,
            started_ns: BOOT,
            run_id: "job7".to_owned(),
            names: NAMES.to_owned(),
            ..Header::default()
        };
        let mut words = header.encode().to_vec();
        words.resize(FILE_LEN, 0);
        Self { words, next: 1, groups: 0 }
    }

    /// Adds a group that was formed at the start of the recording.
    fn group(mut self, name: &str, rank: u32, size: u32, change: impl FnOnce(&mut Group)) -> Self {
        self.groups += 1;
        let mut group = Group {
            number: self.groups,
            state: GroupState::Formed,
            cause: None,
            rank,
            size,
            id: 9,
            generation: Some(Generation::from_bytes([3; 16])),
            created_ns: BOOT,
            ended_ns: 0,
            name: name.to_owned(),
            world_ranks: None,
        };
        change(&mut group);
        let at = group_at(self.groups as usize - 1);
        self.words[at..at + GROUP_LEN].copy_from_slice(&group.encode());
        self
    }

    fn world(self, rank: u32) -> Self {
        self.group("world", rank, 4, |_| {})
    }

    /// Adds a call of group number `group`, made `second` seconds after the start. It took no time.
    fn call(
        mut self,
        group: u32,
        seq: u64,
        second: u64,
        call: [u8; 16],
        change: impl FnOnce(&mut Entry),
    ) -> Self {
        let at = BOOT + second * SECOND;
        let mut entry = Entry {
            number: self.next,
            group,
            state: State::Done,
            operation: Operation::Collective,
            algorithm: 1,
            seq,
            call,
            enqueued_ns: at,
            started_ns: at,
            ended_ns: at,
            received_bytes: 0,
            sent_bytes: 0,
            to_receive_bytes: 0,
            to_send_bytes: 0,
            thread: 1,
            waits_for: 0,
            peers: [0; LISTED_PEERS],
        };
        change(&mut entry);
        let at = entry_at(self.next);
        self.words[at..at + ENTRY_LEN].copy_from_slice(&entry.encode());
        self.next += 1;
        self
    }

    fn exit(mut self, second: u64, cause: ExitCause, stopped: bool) -> Self {
        let exit = Exit { unix_ns: WALL + second * SECOND, cause, stopped };
        self.words[header::EXIT..header::EXIT + 2].copy_from_slice(&exit.encode());
        self
    }

    fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn recording(&self) -> Recording {
        Recording::decode(&self.bytes()).unwrap()
    }
}

fn waits(peers: &'static [u32]) -> impl FnOnce(&mut Entry) {
    move |entry| {
        entry.state = State::Running;
        entry.ended_ns = 0;
        entry.waits_for = peers.len() as u32;
        entry.peers[..peers.len()].copy_from_slice(peers);
    }
}

fn fails(peers: &'static [u32]) -> impl FnOnce(&mut Entry) {
    move |entry| {
        waits(peers)(entry);
        entry.state = State::Failed;
    }
}

fn failed(kind: CauseKind, suspect: u32, second: u64) -> impl FnOnce(&mut Group) {
    move |group| {
        group.state = GroupState::Failed;
        group.cause = Some(Cause { kind, suspect: Some(suspect), reported_by: 0 });
        group.ended_ns = BOOT + second * SECOND;
    }
}

/// Returns the snapshots 40 seconds after the start of the recordings.
fn snapshots_of(files: &[TestRecording], status: ProcessStatus) -> Vec<GroupSnapshot> {
    let recordings: Vec<Recording> = files.iter().map(TestRecording::recording).collect();
    let observers: Vec<_> = recordings.iter().map(|recording| Observer { recording, status }).collect();
    snapshots(&observers, WALL + 40 * SECOND)
}

fn lines(files: &[TestRecording], status: ProcessStatus) -> Vec<String> {
    snapshots_of(files, status).iter().map(ToString::to_string).collect()
}

fn line(files: &[TestRecording], status: ProcessStatus) -> String {
    let lines = lines(files, status);
    assert_eq!(lines.len(), 1, "{lines:?}");
    lines.concat()
}

/// Rank 2 does not make the call in which the others wait. They wait around a ring, so that only one of
/// them waits for rank 2 directly.
fn one_is_late() -> Vec<TestRecording> {
    let late = |rank: u32| TestRecording::of(rank).world(rank).call(1, 41, 10, barrier(), |_| {});
    let peers: [&'static [u32]; 4] = [&[3], &[0], &[], &[2]];
    (0..4)
        .map(|rank| match rank {
            2 => late(rank),
            _ => late(rank).call(1, 42, 11, sum(100), waits(peers[rank as usize])),
        })
        .collect()
}

#[test]
fn rank_that_does_not_call_is_named_with_idle_time() {
    assert_eq!(
        line(&one_is_late(), ProcessStatus::Alive),
        "group world: rank 2 is at seq 41 barrier() (idle 30 s); \
         ranks 0,1,3 wait in seq 42 all_reduce(f32, 100, sum) for rank 2 (29 s)"
    );
}

#[test]
fn recordings_of_exited_processes_are_described_without_durations() {
    assert_eq!(
        line(&one_is_late(), ProcessStatus::Gone),
        "group world: rank 2 was at seq 41 barrier(); \
         ranks 0,1,3 waited in seq 42 all_reduce(f32, 100, sum) for rank 2"
    );
}

#[test]
fn report_distinguishes_ranks_without_calls_from_unrecorded_ranks() {
    let mut files = one_is_late();
    files[2] = TestRecording::of(2).world(2);
    let text = line(&files, ProcessStatus::Alive);
    assert!(
        text.starts_with("group world: rank 2 has called nothing (idle 40 s); ranks 0,1,3 wait"),
        "{text}"
    );
    // The process of rank 2 has a recording, but not of this group.
    files[2] = TestRecording::of(2);
    let text = line(&files, ProcessStatus::Alive);
    assert!(text.starts_with("group world: rank 2 has not joined; ranks 0,1,3 wait in"), "{text}");
    files.remove(2);
    let text = line(&files, ProcessStatus::Alive);
    assert!(text.ends_with("for rank 2 (29 s); no recording of rank 2"), "{text}");
}

#[test]
fn waiting_times_end_at_the_group_failure() {
    let files: Vec<TestRecording> = (0..4)
        .map(|rank| {
            let file = TestRecording::of(rank).group(
                "world",
                rank,
                4,
                failed(CauseKind::Timeout, 2, 25 + u64::from(rank)),
            );
            let file = file.call(1, 41, 10, barrier(), |_| {});
            if rank == 2 { file } else { file.call(1, 42, 11, sum(100), fails(&[2])) }
        })
        .collect();
    assert_eq!(
        line(&files, ProcessStatus::Gone),
        "group world: rank 2 was at seq 41 barrier() (idle 15 s); \
         ranks 0,1,3 waited in seq 42 all_reduce(f32, 100, sum) for rank 2 (rank 0 timed out waiting for rank 2)"
    );
}

#[test]
fn report_distinguishes_dead_ranks_from_stopped_ranks() {
    let file = |rank| TestRecording::of(rank).group("world", rank, 4, failed(CauseKind::Lost, 1, 20));
    let mut files = vec![
        file(0).call(1, 5, 11, sum(100), fails(&[1])),
        TestRecording::of(1).world(1).call(1, 5, 11, sum(100), waits(&[2])),
        file(2).call(1, 5, 11, sum(100), fails(&[1])),
        TestRecording::of(3).world(3).call(1, 4, 9, barrier(), |_| {}),
    ];
    let text = "group world: rank 1 died in seq 5 all_reduce(f32, 100, sum); rank 3 was at seq 4 barrier(); \
                ranks 0,2 waited in seq 5 all_reduce(f32, 100, sum) for rank 1 (rank 1 was lost, says rank 0)";
    assert_eq!(line(&files, ProcessStatus::Gone).replace(" (idle 11 s)", ""), text);
    // The line is equal if no rank detected the loss and the launcher has written the exits.
    for rank in [0, 2] {
        files[rank as usize] = TestRecording::of(rank).world(rank).call(1, 5, 11, sum(100), waits(&[1]));
    }
    files[1] = files[1].clone().exit(20, ExitCause::Signal(9), false);
    for rank in [0, 2, 3] {
        files[rank] = files[rank].clone().exit(21, ExitCause::Signal(15), true);
    }
    assert_eq!(
        line(&files, ProcessStatus::Gone),
        "group world: rank 1 died in seq 5 all_reduce(f32, 100, sum); rank 3 was at seq 4 barrier() (idle 12 s); \
         ranks 0,2 waited in seq 5 all_reduce(f32, 100, sum) for rank 1 (10 s)"
    );
}

#[test]
fn rank_that_notices_the_end_of_a_stopped_rank_reports_no_failure() {
    let waiting = |rank| TestRecording::of(rank).world(rank).call(1, 5, 11, sum(100), waits(&[2]));
    let noticed = |second| {
        let notices = |group: &mut Group| {
            failed(CauseKind::Lost, 0, second)(group);
            group.cause.as_mut().unwrap().reported_by = 3;
        };
        TestRecording::of(3).group("world", 3, 4, notices).call(1, 5, 11, sum(100), fails(&[2]))
    };
    let mut files = vec![
        waiting(0),
        waiting(1),
        TestRecording::of(2).world(2).call(1, 4, 9, barrier(), |_| {}),
        noticed(21),
    ];
    for file in &mut files {
        *file = file.clone().exit(21, ExitCause::Signal(15), true);
    }
    assert_eq!(
        line(&files, ProcessStatus::Gone),
        "group world: rank 2 was at seq 4 barrier() (idle 12 s); \
         ranks 0,1,3 waited in seq 5 all_reduce(f32, 100, sum) for rank 2 (10 s)"
    );
    // The loss is the cause if the rank that noticed it ended by itself, or if it was noticed long before.
    let exited = noticed(21).exit(21, ExitCause::Code(1), false);
    for other in [exited, noticed(19).exit(21, ExitCause::Signal(15), true)] {
        files[3] = other;
        let text = line(&files, ProcessStatus::Gone);
        assert!(text.ends_with(" (rank 0 was lost, says rank 3)"), "{text}");
    }
}

#[test]
fn differing_calls_are_listed_together() {
    let file = |rank| TestRecording::of(rank).group("world", rank, 2, failed(CauseKind::Mismatch, 1, 20));
    let files = [file(0).call(1, 5, 11, sum(8), fails(&[1])), file(1).call(1, 5, 11, sum(7), fails(&[0]))];
    assert_eq!(
        line(&files, ProcessStatus::Gone),
        "group world: rank 0 waited in seq 5 all_reduce(f32, 8, sum) for rank 1; \
         rank 1 waited in seq 5 all_reduce(f32, 7, sum) for rank 0 (the calls of rank 1 and rank 0 differ)"
    );
}

#[test]
fn report_names_ranks_waiting_in_another_group() {
    let half = |file: TestRecording, rank| {
        file.group("world/0.0", rank, 2, |group| group.world_ranks = Some(vec![4, 6]))
    };
    let recv = |entry: &mut Entry| {
        waits(&[1])(entry);
        entry.operation = Operation::Recv;
    };
    let files = [
        half(TestRecording::of(4).group("world", 4, 8, |_| {}), 0).call(2, 0, 11, message(), recv),
        half(TestRecording::of(6).group("world", 6, 8, |_| {}), 1).call(1, 2, 12, barrier(), waits(&[4])),
    ];
    assert_eq!(
        lines(&files, ProcessStatus::Alive),
        [
            "group world: rank 4 is in group world/0.0: recv(f32, 3, tag 7) from rank 6; \
             rank 6 waits in seq 2 barrier() for rank 4 (28 s); no recording of ranks 0-3,5,7",
            "group world/0.0: rank 6 is in group world: seq 2 barrier(); \
             rank 4 waits in recv(f32, 3, tag 7) from rank 6 (29 s)",
        ]
    );
}

#[test]
fn report_distinguishes_forming_failed_and_earlier_groups() {
    let forming =
        |rank| TestRecording::of(rank).group("world", rank, 3, |group| group.state = GroupState::Forming);
    assert_eq!(
        line(&[forming(0), forming(1)], ProcessStatus::Alive),
        "group world: ranks 0,1 wait for the others to join (40 s); no recording of rank 2"
    );
    let unformed = |group: &mut Group| {
        failed(CauseKind::Timeout, 2, 30)(group);
        group.state = GroupState::Unformed;
    };
    let file = |rank| {
        TestRecording::of(rank).group("world", rank, 2, unformed).group("world", rank, 2, |group| {
            group.generation = Some(Generation::from_bytes([4; 16]));
            group.created_ns = BOOT + 35 * SECOND;
        })
    };
    let both = snapshots_of(&[file(0), file(1)], ProcessStatus::Alive);
    assert_eq!(
        both[0].to_string(),
        "group world: ranks 0,1 did not form the group (rank 0 timed out waiting for rank 2)"
    );
    assert_eq!((both[0].superseded, both[1].superseded), (true, false));
    assert_eq!(both[1].to_string(), "group world: ranks 0,1 have called nothing (idle 5.0 s)");
    assert!(!both[0].is_open() && !both[1].is_open());
}

#[test]
fn wait_chains_and_wait_cycles_are_reported() {
    let file = |rank, peers| {
        TestRecording::of(rank).group("world", rank, 3, |_| {}).call(1, 1, 5, barrier(), waits(peers))
    };
    let circle = [file(0, &[1]), file(1, &[2]), file(2, &[0])];
    assert!(line(&circle, ProcessStatus::Alive).contains("wait in seq 1 barrier() for each other (35 s)"));
    assert!(
        line(&circle[..2], ProcessStatus::Alive)
            .contains("ranks 0,1 wait in seq 1 barrier() for rank 2 (35 s)")
    );
}

#[test]
fn rank_lists_and_durations_are_short() {
    let ranks = |ranks: &[u32]| RankList(ranks).to_string();
    assert_eq!(ranks(&[3]), "rank 3");
    assert_eq!(ranks(&[0, 1, 3]), "ranks 0,1,3");
    assert_eq!(ranks(&[0, 1, 2, 3, 7, 8]), "ranks 0-3,7,8");
    let odd: Vec<u32> = (0..1000).map(|rank| 2 * rank).collect();
    assert!(ranks(&odd).ends_with(",28,30 and others"), "{}", ranks(&odd));
    let spans = [250_000, 42 * SECOND / 1000, 3 * SECOND + SECOND / 10, 30 * SECOND, 900 * SECOND]
        .map(format_duration);
    assert_eq!(spans, ["0.25 ms", "42 ms", "3.1 s", "30 s", "15 min"]);
}

#[test]
fn recording_round_trips() {
    let texts = "x".repeat(500);
    let header = Header {
        rank: Some(7),
        world_size: None,
        local_rank: Some(1),
        restart_count: 3,
        process: Process { pid: 1, start_ticks: 2, pid_namespace: 3, boot_id: u128::MAX - 1 },
        generation: None,
        started_unix_ns: WALL,
        started_ns: BOOT,
        run_id: format!("\u{e9}{texts}"),
        host: "node\u{1b}[2J".to_owned(),
        names: NAMES.to_owned(),
    };
    let read = Header::decode(&header.encode());
    assert_eq!(
        read,
        Header { run_id: format!("\u{e9}{}", &texts[..118]), host: "node\u{fffd}[2J".to_owned(), ..header }
    );
    let file = TestRecording::of(1).group("a", 2, 100, |group| group.world_ranks = Some((50..150).collect()));
    let group = &file.recording().groups[0];
    assert_eq!(
        (group.world_ranks.as_ref().map(Vec::len), group.world_rank(63), group.world_rank(64)),
        (Some(64), 113, 64)
    );
    for cause in [ExitCause::Code(-3), ExitCause::Signal(9)] {
        let exit = Exit { unix_ns: 5, cause, stopped: true };
        assert_eq!(Exit::decode(exit.encode()), Some(exit));
    }
}

#[test]
fn invalid_recording_error_describes_the_file() {
    let whole = one_is_late()[0].bytes();
    let mut foreign = whole.clone();
    foreign[0] ^= 1;
    let mut later = whole.clone();
    later[8] = 2;
    let error = |bytes: &[u8]| Recording::decode(bytes).unwrap_err();
    assert_eq!(error(&foreign), FormatError::Foreign);
    assert_eq!(error(&later), FormatError::Version { found: 2 });
    for length in [0, 7, 8, 15, 16, 2047, 2048, FILE_BYTES - 1] {
        assert_eq!(error(&whole[..length]), FormatError::Truncated { found: length });
    }
    // A file of zeros has the right size, but no header.
    assert_eq!(error(&vec![0; FILE_BYTES]), FormatError::Foreign);
    assert_eq!(error(b"{\"version\": 1, \"outcome\": \"failed\"}"), FormatError::Foreign);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// Recordings with random changes give lines of bounded length without control characters.
    #[test]
    fn false_recordings_cause_no_panic(
        changes in prop::collection::vec((0..4_usize, 0..FILE_LEN, any::<u64>(), 0..3_u8), 0..40),
        length in prop_oneof![4 => Just(FILE_BYTES), 1 => 0..FILE_BYTES],
    ) {
        let mut files = one_is_late();
        for (which, place, word, how) in changes {
            // A word of any record, of the header and first group, or of the first two calls.
            let place = if how == 0 { place } else { place % (HEADER_LEN + GROUP_LEN) };
            let place = if how == 2 { entry_at(1) + place % (2 * ENTRY_LEN) } else { place };
            if place > 1 {
                files[which].words[place] = word;
            }
        }
        let recordings: Vec<Recording> =
            files.iter().filter_map(|file| Recording::decode(&file.bytes()[..length]).ok()).collect();
        prop_assert_eq!(recordings.len(), if length == FILE_BYTES { 4 } else { 0 });
        let observers: Vec<_> =
            recordings.iter().map(|recording| Observer { recording, status: ProcessStatus::Unknown }).collect();
        for standing in snapshots(&observers, u64::MAX) {
            let text = standing.to_string();
            prop_assert!(text.len() < 10_000 && !text.contains(char::is_control), "{}", text);
            prop_assert!(serde_json::to_string(&standing).is_ok());
        }
    }

    /// Random bytes after a correct magic number and version are refused or give bounded lines.
    #[test]
    fn random_bytes_are_read_or_refused(seed in any::<u64>(), length in 0..=FILE_BYTES) {
        let mut state = seed;
        let mut bytes: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .take(length)
        .collect();
        let beginning = [MAGIC.to_le_bytes(), VERSION.to_le_bytes()].concat();
        let common = length.min(beginning.len());
        bytes[..common].copy_from_slice(&beginning[..common]);
        if let Ok(recording) = Recording::decode(&bytes) {
            let observer = Observer { recording: &recording, status: ProcessStatus::Gone };
            for standing in snapshots(&[observer], 0) {
                prop_assert!(standing.to_string().len() < 10_000);
            }
        }
    }
}
