//! The agent channel: a unix stream socket that each worker inherits as CONVOKE_AGENT_FD.
//!
//! The launcher writes one JSON object per line and never waits for the worker. If a worker does not
//! read, messages that do not fit into the socket's buffer are dropped. A worker skips unknown
//! messages, so that a newer launcher can serve an older worker.

use std::fmt;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv};
use serde::{Deserialize, Serialize};

use crate::generation::Generation;
use crate::vars;

/// Longest message in bytes, newline included.
pub const MAX_MESSAGE_BYTES: usize = 64 << 10;

/// Longest token that a user may set, in bytes.
pub const MAX_TOKEN_BYTES: usize = 4096;

/// The error for a token of the user that is unreadable, empty or too long.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("token from {source_name}: {what}")]
pub struct TokenError {
    source_name: String,
    what: String,
}

crate::debug_as_display!(TokenError);

/// The secret with which workers of one job authenticate to each other. `Debug` does not print it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token(Vec<u8>);

impl Token {
    /// Creates a token of the given bytes, of any length.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// Creates a token of 32 random bytes.
    ///
    /// # Errors
    /// Fails if the operating system provides no random numbers.
    pub fn random() -> io::Result<Self> {
        let mut bytes = vec![0; 32];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        Ok(Self(bytes))
    }

    /// Returns the token that the user set; `None` if neither variable is set.
    ///
    /// CONVOKE_TOKEN has precedence over the file that CONVOKE_TOKEN_FILE names. Line ends at the end
    /// of the file are removed.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or if the token is empty or longer than [`MAX_TOKEN_BYTES`].
    pub fn from_process() -> Result<Option<Self>, TokenError> {
        use std::os::unix::ffi::OsStringExt;
        let error = |source: String, what| TokenError { source_name: source, what };
        let (source, bytes) = if let Some(value) = std::env::var_os(vars::TOKEN) {
            (vars::TOKEN.to_owned(), value.into_vec())
        } else if let Some(path) = std::env::var_os(vars::TOKEN_FILE) {
            let source = format!("{}={}", vars::TOKEN_FILE, path.to_string_lossy());
            let mut bytes = Vec::new();
            let read = std::fs::File::open(&path)
                .and_then(|file| file.take(MAX_TOKEN_BYTES as u64 + 2).read_to_end(&mut bytes));
            read.map_err(|io| error(source.clone(), io.to_string()))?;
            let end = bytes.iter().rposition(|byte| !b"\r\n".contains(byte)).map_or(0, |last| last + 1);
            bytes.truncate(end);
            (source, bytes)
        } else {
            return Ok(None);
        };
        match bytes.len() {
            0 => Err(error(source, "it is empty".to_owned())),
            1..=MAX_TOKEN_BYTES => Ok(Some(Self(bytes))),
            _ => Err(error(source, format!("it is longer than {MAX_TOKEN_BYTES} bytes"))),
        }
    }

    /// Returns the bytes of the secret.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({} bytes)", self.0.len())
    }
}

/// The exit code or the signal with which a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitCause {
    /// The process exited with this code.
    Code(i32),
    /// This signal ended the process.
    Signal(i32),
}

/// A message from the launcher to a worker, in JSON. New fields must be optional, so that launcher and
/// worker may have different versions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum ToWorker {
    /// The first message on the channel.
    Hello {
        /// Generation of the rendezvous round in which this worker was started.
        generation: Generation,
        /// Secret of the job; `None` if workers do not authenticate.
        #[serde(skip_serializing_if = "Option::is_none")]
        token: Option<Token>,
    },
    /// Another worker of the same rendezvous round has ended.
    PeerExit {
        /// Generation of that worker.
        generation: Generation,
        /// Global rank of that worker.
        rank: usize,
        /// Exit code or signal of that worker.
        cause: ExitCause,
    },
    /// The job is drained: the worker should save its state at the next step and exit.
    Drain {
        /// Time in milliseconds after which the launcher stops the worker.
        left_ms: u64,
    },
    /// A message of a newer launcher. [`AgentChannel::receive`] skips it.
    #[serde(other)]
    Unknown,
}

impl ToWorker {
    /// Encodes the message as one line with its newline.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("strings and numbers are valid JSON");
        bytes.push(b'\n');
        bytes
    }

    /// Decodes one line without its newline.
    ///
    /// # Errors
    /// [`ChannelError::Malformed`] if the line is not a message.
    pub fn decode(line: &[u8]) -> Result<Self, ChannelError> {
        serde_json::from_slice(line).map_err(|error| ChannelError::Malformed { what: error.to_string() })
    }
}

/// The errors of the agent channel.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// CONVOKE_AGENT_FD does not name an open socket.
    #[error(
        "CONVOKE_AGENT_FD={value:?} is not an open socket: was it closed, or the variable inherited by mistake?"
    )]
    NotAChannel {
        /// Value of the variable, cut to 64 characters.
        value: String,
    },
    /// The launcher sent bytes that are not a message.
    #[error("malformed message on the agent channel: {what}")]
    Malformed {
        /// Description of the error.
        what: String,
    },
    /// No message came before the timeout.
    #[error("no message from the launcher within {} ms", after.as_millis())]
    Timeout {
        /// The time waited.
        after: Duration,
    },
    /// The launcher closed its end of the channel.
    #[error("the launcher closed the agent channel")]
    Closed,
    /// A system call on the socket failed.
    #[error("agent channel: {0}")]
    Io(#[from] io::Error),
}

crate::debug_as_display!(ChannelError);

/// The worker's end of the agent channel.
#[derive(Debug)]
pub struct AgentChannel {
    stream: UnixStream,
    /// Received bytes that have not been decoded.
    received: Vec<u8>,
}

impl AgentChannel {
    /// Returns the channel that this process inherited; `None` without CONVOKE_AGENT_FD.
    ///
    /// The descriptor is duplicated, so the call may be repeated. All duplicates share one byte
    /// stream, and each message reaches only one of them.
    ///
    /// # Errors
    /// [`ChannelError::NotAChannel`] if the variable does not name an open socket.
    pub fn inherited() -> Result<Option<Self>, ChannelError> {
        let Some(value) = std::env::var_os(vars::AGENT_FD) else { return Ok(None) };
        let value = value.to_string_lossy();
        let not_a_channel = || ChannelError::NotAChannel { value: value.chars().take(64).collect() };
        let raw: RawFd = value.parse().ok().filter(|&fd| fd >= 0).ok_or_else(not_a_channel)?;
        let fd = duplicate(raw).ok_or_else(not_a_channel)?;
        let is_socket = nix::sys::socket::getsockopt(&fd, nix::sys::socket::sockopt::SockType).is_ok();
        if !is_socket {
            return Err(not_a_channel());
        }
        Ok(Some(Self::new(UnixStream::from(fd))))
    }

    /// Creates a channel over `stream`.
    #[must_use]
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, received: Vec::new() }
    }

    /// Returns the descriptor to poll for readability. Poll it only after [`Self::receive`] returned a
    /// timeout, because a message may already be buffered.
    #[must_use]
    pub fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Waits for the next message that this version knows.
    ///
    /// If the timeout passes in the middle of a message, the next function call continues with the
    /// rest of it.
    ///
    /// # Errors
    /// [`ChannelError::Timeout`] after `timeout`; [`ChannelError::Closed`] if the launcher is gone;
    /// [`ChannelError::Malformed`] for a line that is not a message or is longer than
    /// [`MAX_MESSAGE_BYTES`].
    pub fn receive(&mut self, timeout: Duration) -> Result<ToWorker, ChannelError> {
        let deadline = Instant::now() + timeout;
        loop {
            let end = self.received.iter().take(MAX_MESSAGE_BYTES).position(|&byte| byte == b'\n');
            if let Some(end) = end {
                let message = ToWorker::decode(&self.received[..end]);
                self.received.drain(..=end);
                match message? {
                    ToWorker::Unknown => {}
                    message => return Ok(message),
                }
            } else if self.received.len() >= MAX_MESSAGE_BYTES {
                let what = format!("longer than {MAX_MESSAGE_BYTES} bytes");
                return Err(ChannelError::Malformed { what });
            } else if !self.fill()? {
                if Instant::now() >= deadline {
                    return Err(ChannelError::Timeout { after: timeout });
                }
                self.wait_until(deadline)?;
            }
        }
    }

    /// Receives the available bytes. Returns false if there are none.
    fn fill(&mut self) -> Result<bool, ChannelError> {
        let mut bytes = [0; 4096];
        match recv(self.stream.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Err(ChannelError::Closed),
            Ok(count) => {
                self.received.extend_from_slice(&bytes[..count]);
                Ok(true)
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }

    /// Sleeps until bytes arrive, at most until `deadline`.
    ///
    /// A signal may end the sleep early, so the caller must check the clock. A timeout of the socket
    /// itself would start again after each signal.
    fn wait_until(&self, deadline: Instant) -> Result<(), ChannelError> {
        let left = deadline.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000);
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }
}

/// Returns a close-on-exec duplicate of an inherited descriptor; `None` if it is not open.
#[allow(unsafe_code)]
fn duplicate(raw: RawFd) -> Option<OwnedFd> {
    // SAFETY: `borrow_raw` requires a descriptor that is not -1 and stays open during the borrow.
    // - `raw` is not -1: the caller checked that it is not negative.
    // - The borrow lasts for one fcntl call. If `raw` is not open, or another thread closes it at this
    //   moment, fcntl returns EBADF and accesses no memory of this process.
    // - The borrow does not close `raw`, so its owner keeps it.
    let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(raw) };
    borrowed.try_clone_to_owned().ok()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    fn pair() -> (UnixStream, AgentChannel) {
        let (launcher, worker) = UnixStream::pair().unwrap();
        (launcher, AgentChannel::new(worker))
    }

    fn hello() -> ToWorker {
        ToWorker::Hello { generation: Generation::from_bytes([1; 16]), token: Some(Token::new(vec![1, 2])) }
    }

    #[test]
    fn messages_round_trip_and_unknown_ones_are_skipped() {
        let (mut launcher, mut worker) = pair();
        let exit = ToWorker::PeerExit {
            generation: Generation::from_bytes([2; 16]),
            rank: 3,
            cause: ExitCause::Signal(9),
        };
        launcher.write_all(&hello().encode()).unwrap();
        launcher.write_all(b"{\"type\":\"from_the_future\",\"x\":1}\n").unwrap();
        launcher.write_all(&exit.encode()).unwrap();
        assert_eq!(worker.receive(SOON).unwrap(), hello());
        assert_eq!(worker.receive(SOON).unwrap(), exit);
        drop(launcher);
        assert!(matches!(worker.receive(SOON), Err(ChannelError::Closed)));
    }

    #[test]
    fn message_cut_by_a_timeout_is_continued() {
        let (mut launcher, mut worker) = pair();
        let bytes = hello().encode();
        launcher.write_all(&bytes[..10]).unwrap();
        let short = Duration::from_millis(5);
        assert!(matches!(worker.receive(short), Err(ChannelError::Timeout { .. })));
        launcher.write_all(&bytes[10..]).unwrap();
        assert_eq!(worker.receive(SOON).unwrap(), hello());
    }

    /// Sends signals without SA_RESTART to this thread only, as an interval timer does to a process.
    #[test]
    #[allow(unsafe_code)]
    fn wait_ends_in_time_despite_frequent_signals() {
        use std::sync::atomic::{AtomicBool, Ordering};

        use nix::libc;
        use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

        extern "C" fn nothing(_: libc::c_int) {}
        let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler does nothing, so it is async-signal-safe, and no other code of this test
        // program handles the signal.
        unsafe { sigaction(Signal::SIGUSR2, &action) }.unwrap();
        // SAFETY: pthread_self has no preconditions.
        let target = unsafe { libc::pthread_self() };
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let until = Instant::now() + SOON;
                while !over.load(Ordering::Relaxed) && Instant::now() < until {
                    // SAFETY: `target` is the thread that runs this scope, and the scope keeps it alive
                    // until this thread has ended.
                    unsafe { libc::pthread_kill(target, libc::SIGUSR2) };
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let (mut launcher, mut worker) = pair();
            let started = Instant::now();
            for wait in [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(200)] {
                assert!(matches!(worker.receive(wait), Err(ChannelError::Timeout { .. })));
            }
            assert!(started.elapsed() < SOON / 2, "{:?}", started.elapsed());
            launcher.write_all(&hello().encode()).unwrap();
            assert_eq!(worker.receive(SOON).unwrap(), hello());
            over.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn garbage_is_an_error_instead_of_a_hang() {
        let long = vec![b'x'; MAX_MESSAGE_BYTES + 1];
        let cases: [&[u8]; 6] = [
            b"\n",
            b"not json\n",
            b"{\"type\":\"hello\",\"generation\":\"zz\"}\n",
            b"{\"type\":\"peer_exit\",\"generation\":\"00000000000000000000000000000001\",\"rank\":-1}\n",
            b"[1,2]\n",
            &long,
        ];
        for bytes in cases {
            let (mut launcher, mut worker) = pair();
            let writer = std::thread::spawn({
                let bytes = bytes.to_vec();
                move || launcher.write_all(&bytes)
            });
            assert!(matches!(worker.receive(SOON), Err(ChannelError::Malformed { .. })), "{bytes:?}");
            drop(worker);
            let _ = writer.join().unwrap();
        }
    }

    proptest! {
        /// Any line is decoded to a message, skipped as unknown or refused.
        #[test]
        fn random_lines_never_cause_a_panic(
            which in 0..2_usize,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 0..5),
            noise in prop::option::weighted(0.1, prop::collection::vec(any::<u8>(), 0..100)),
        ) {
            let (generation, cause) = (Generation::from_bytes([2; 16]), ExitCause::Signal(9));
            let exit = ToWorker::PeerExit { generation, rank: 3, cause };
            let mut line = noise.unwrap_or_else(|| [hello(), exit][which].encode());
            for (place, byte, how) in changes {
                let place = place.index(line.len() + 1);
                match how {
                    0 => line.truncate(place),
                    1 => line.insert(place, byte),
                    _ => line.iter_mut().skip(place).take(1).for_each(|old| *old = byte),
                }
            }
            if let Ok(message) = ToWorker::decode(&line) {
                prop_assert_eq!(ToWorker::decode(&message.encode()).unwrap(), message);
            }
        }
    }

    #[test]
    fn token_is_not_printed() {
        assert_eq!(format!("{:?}", Token::new(vec![42; 3])), "Token(3 bytes)");
    }
}
