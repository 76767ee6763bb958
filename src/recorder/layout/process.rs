//! The header of a recording: the process that made it, and its end. Pure.

use convoke_env::{ExitCause, Generation};

use super::words::{
    NONE, byte, encode_generation, generation, get_line, get_text, halves, high, low, optional, pair,
    put_text, whole,
};
use super::{HEADER_LEN, MAGIC, VERSION};

/// The header of a recording: the process that made it, and the start of the recording.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Header {
    /// Value of RANK, if it was set.
    pub rank: Option<u32>,
    /// Value of WORLD_SIZE, if it was set.
    pub world_size: Option<u32>,
    /// Value of LOCAL_RANK, if it was set.
    pub local_rank: Option<u32>,
    /// Value of TORCHELASTIC_RESTART_COUNT; 0 if it was not set.
    pub restart_count: u32,
    /// The process that made the recording.
    pub process: Process,
    /// The generation that the launcher set; `None` under another launcher.
    pub generation: Option<Generation>,
    /// Start of the recording, in nanoseconds since 1970.
    pub started_unix_ns: u64,
    /// Start of the recording, in nanoseconds of CLOCK_MONOTONIC, which all processes of a boot share.
    /// The times of groups and calls use this clock.
    pub started_ns: u64,
    /// Value of TORCHELASTIC_RUN_ID, cut to 120 bytes.
    pub run_id: String,
    /// Name of the host, cut to 120 bytes.
    pub host: String,
    /// The names of operations and element types that the writer uses, see [`crate::names`].
    pub names: String,
}

/// The identity of a process. It is unique across hosts, boots and reused pids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Process {
    /// Pid in the namespace of the process.
    pub pid: u32,
    /// Start time, in clock ticks since the boot; 0 if it is not known.
    pub start_ticks: u64,
    /// Inode of the pid namespace; 0 if it is not known.
    pub pid_namespace: u64,
    /// Boot id of the kernel; 0 if it is not known.
    pub boot_id: u128,
}

/// When and how the process ended, as reported by its launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// Time of the end, in nanoseconds since 1970.
    pub unix_ns: u64,
    /// Exit code or signal.
    pub cause: ExitCause,
    /// True if the launcher had stopped the process, because of another failure or at the user's
    /// request.
    pub stopped: bool,
}

impl Header {
    /// Encodes the header of a recording that has no groups and calls yet.
    #[must_use]
    pub fn encode(&self) -> Box<[u64; HEADER_LEN]> {
        let mut words = Box::new([0; HEADER_LEN]);
        let number = |number: Option<u32>| number.unwrap_or(NONE);
        words[0] = MAGIC;
        words[1] = VERSION;
        words[4] = pair(number(self.rank), number(self.world_size));
        words[5] = pair(number(self.local_rank), self.restart_count);
        words[6] = u64::from(self.process.pid);
        words[7] = self.process.start_ticks;
        words[8] = self.process.pid_namespace;
        words[9..11].copy_from_slice(&halves(self.process.boot_id));
        words[11..13].copy_from_slice(&encode_generation(self.generation));
        words[13] = self.started_unix_ns;
        words[14] = self.started_ns;
        put_text(&mut words[17..33], &self.run_id);
        put_text(&mut words[33..49], &self.host);
        put_text(&mut words[49..], &self.names);
        words
    }

    /// Decodes a header. The caller must have checked the first two words, see [`MAGIC`].
    #[must_use]
    pub fn decode(words: &[u64; HEADER_LEN]) -> Self {
        Self {
            rank: optional(low(words[4])),
            world_size: optional(high(words[4])),
            local_rank: optional(low(words[5])),
            restart_count: high(words[5]),
            process: Process {
                pid: low(words[6]),
                start_ticks: words[7],
                pid_namespace: words[8],
                boot_id: whole(words[9], words[10]),
            },
            generation: generation(words[11], words[12]),
            started_unix_ns: words[13],
            started_ns: words[14],
            run_id: get_line(&words[17..33]),
            host: get_line(&words[33..49]),
            names: get_text(&words[49..]),
        }
    }
}

impl Exit {
    /// Encodes when and how the process ended, as the words at [`super::header::EXIT`].
    #[must_use]
    pub fn encode(&self) -> [u64; 2] {
        let (kind, number) = match self.cause {
            ExitCause::Code(code) => (1, code),
            ExitCause::Signal(signal) => (2, signal),
        };
        [self.unix_ns, pair(number.cast_unsigned(), kind | u32::from(self.stopped) << 8)]
    }

    /// Decodes when and how the process ended; `None` if the launcher has not written it.
    #[must_use]
    pub fn decode(words: [u64; 2]) -> Option<Self> {
        let number = low(words[1]).cast_signed();
        let cause = match byte(words[1], 4) {
            1 => ExitCause::Code(number),
            2 => ExitCause::Signal(number),
            _ => return None,
        };
        Some(Self { unix_ns: words[0], cause, stopped: byte(words[1], 5) != 0 })
    }
}
