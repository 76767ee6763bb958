//! Messages between launcher and guard: length-prefixed JSON over a unix stream socket.
//!
//! Pure: bytes in, messages out. File descriptors are sent beside the bytes (SCM_RIGHTS). Each message says
//! how many descriptors belong to it.

use std::ffi::OsString;

use convoke_env::ExitCause;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cause::{Evidence, StartFailure};

/// Longest message, which is a spawn request: a command line and its variables (the kernel's own limit is 6
/// MiB by default).
pub(crate) const MAX_FRAME_BYTES: usize = 64 << 20;

/// Id of one worker process, never reused in the life of a launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct WorkerId(pub(crate) u64);

/// Requests of the launcher to the guard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToGuard {
    /// Start a worker. The message carries these descriptors: agent channel, then stdout and stderr if they
    /// are not inherited.
    Spawn(SpawnRequest),
    /// Send a signal to the process group of a worker that has not been reported as exited.
    Signal { id: WorkerId, signal: i32 },
    /// Send a signal to those processes of the worker that have a handler for it. The answer is `Forwarded`.
    Forward { id: WorkerId, signal: i32 },
    /// End every process that is left after all workers have exited. The guard sends SIGTERM after
    /// `delay_ms`, and SIGKILL after another `grace_ms`. The answer is `Swept`.
    Sweep { delay_ms: u64, grace_ms: u64 },
    /// Exit without ending processes that may still run.
    Exit,
}

/// The description of a worker to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SpawnRequest {
    pub(crate) id: WorkerId,
    /// Program (searched in PATH) and arguments.
    pub(crate) argv: Vec<OsString>,
    /// Variables set over the launcher's own environment.
    pub(crate) vars: Vec<(OsString, OsString)>,
    /// Variables of the launcher's environment that the worker must not inherit.
    pub(crate) unset: Vec<OsString>,
    /// CPUs on which the worker may run. If empty, it may run on those of the launcher.
    pub(crate) cpus: Vec<usize>,
    /// True if the worker leads a session of its own; false if it leads only a process group.
    pub(crate) own_session: bool,
    /// True if the message carries a descriptor for stdout; otherwise stdout is inherited.
    pub(crate) stdout: bool,
    /// True if the message carries a descriptor for stderr; otherwise stderr is inherited.
    pub(crate) stderr: bool,
}

impl ToGuard {
    /// Returns the number of file descriptors that this message carries.
    pub(crate) fn descriptors(&self) -> usize {
        let Self::Spawn(request) = self else { return 0 };
        1 + usize::from(request.stdout) + usize::from(request.stderr)
    }
}

/// Messages of the guard to the launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum FromGuard {
    /// The worker has executed its program.
    Spawned { id: WorkerId, pid: i32 },
    /// The worker could not be started.
    SpawnFailed { id: WorkerId, error: StartFailure },
    /// The worker ended and has been reaped. `last` is true if no descendant of any worker is left.
    Exited { id: WorkerId, cause: ExitCause, evidence: Evidence, last: bool },
    /// Answer to `Forward`: `caught` is true if the signal was sent, and false if no process of this worker
    /// has a handler for it.
    Forwarded { id: WorkerId, caught: bool },
    /// Answer to `Sweep`: no process that the workers started is left, except `stuck`.
    Swept {
        /// Processes that the guard had to signal.
        stopped: Vec<Orphan>,
        /// Processes that SIGKILL did not end within the time limit (uninterruptible sleep).
        stuck: Vec<Orphan>,
    },
}

/// A process that outlived the worker that started it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Orphan {
    pub(crate) pid: i32,
    pub(crate) name: String,
}

/// Encodes a message as its length and JSON.
pub(crate) fn encode(message: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)?;
    let body = u32::try_from(frame.len() - 4).map_err(serde::ser::Error::custom)?;
    frame[..4].copy_from_slice(&body.to_le_bytes());
    Ok(frame)
}

/// Decodes received bytes into messages.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    buffer: Vec<u8>,
}

impl Decoder {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next complete message, if there is one.
    pub(crate) fn next<M: DeserializeOwned>(&mut self) -> Result<Option<M>, String> {
        let Some(header) = self.buffer.first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_le_bytes(*header) as usize;
        if len > MAX_FRAME_BYTES {
            return Err(format!("a message of {len} bytes (limit {MAX_FRAME_BYTES})"));
        }
        if self.buffer.len() < 4 + len {
            return Ok(None);
        }
        let message = serde_json::from_slice(&self.buffer[4..4 + len]).map_err(|error| error.to_string())?;
        self.buffer.drain(..4 + len);
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_are_decoded_after_any_split_and_with_any_bytes() {
        let odd = OsString::from_vec(vec![b'a', 0xff, b'\n', b'"']);
        let spawn = ToGuard::Spawn(SpawnRequest {
            id: WorkerId(7),
            argv: vec!["sh".into(), odd.clone()],
            vars: vec![("K".into(), odd)],
            unset: vec!["U".into()],
            cpus: vec![0, 65_536],
            own_session: true,
            stdout: true,
            stderr: false,
        });
        assert_eq!(spawn.descriptors(), 2);
        let messages = [spawn, ToGuard::Signal { id: WorkerId(7), signal: 15 }, ToGuard::Exit];
        let bytes: Vec<u8> = messages.iter().flat_map(|message| encode(message).unwrap()).collect();
        for step in [1, 3, bytes.len()] {
            let mut decoder = Decoder::default();
            let mut got = Vec::new();
            for part in bytes.chunks(step) {
                decoder.push(part);
                while let Some(message) = decoder.next::<ToGuard>().unwrap() {
                    got.push(message);
                }
            }
            assert_eq!(got, messages);
        }
    }

    proptest! {
        /// Invalid bytes lead to an error, and an encoded message decodes to an equal one.
        #[test]
        fn random_bytes_never_cause_a_panic(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            signal in any::<i32>(),
            step in 1..50_usize,
        ) {
            let messages = [ToGuard::Signal { id: WorkerId(7), signal }, ToGuard::Exit];
            let mut bytes: Vec<u8> = messages.iter().flat_map(|message| encode(message).unwrap()).collect();
            let whole = changes.is_empty();
            for (place, byte) in changes {
                let place = place.index(bytes.len());
                bytes[place] = byte;
            }
            let (mut decoder, mut got) = (Decoder::default(), Vec::new());
            'parts: for part in bytes.chunks(step) {
                decoder.push(part);
                loop {
                    match decoder.next::<ToGuard>() {
                        Ok(Some(message)) => got.push(message),
                        Ok(None) => break,
                        Err(_) => break 'parts,
                    }
                }
            }
            prop_assert!(!whole || got == messages);
        }
    }

    #[test]
    fn malformed_message_is_an_error() {
        let mut decoder = Decoder::default();
        decoder.push(&u32::MAX.to_le_bytes());
        assert!(decoder.next::<ToGuard>().is_err());
        let mut decoder = Decoder::default();
        decoder.push(b"\x02\0\0\0{}");
        assert!(decoder.next::<ToGuard>().is_err());
    }
}
