//! The messages between the head and the launcher agents of its hosts, over a byte stream that may begin with
//! other text, such as that of a login script. Pure.

use serde::{Deserialize, Serialize};

/// The text after which frames begin. A login script does not print it.
pub(super) const MAGIC: &[u8] = b"\n\x01convoke-agent-1\n";
/// Longest frame, without its header.
pub(super) const MAX_FRAME: usize = 4 << 20;
/// Most bytes of other text before the frames begin.
const MAX_NOISE: usize = 1 << 20;

/// A message of an agent to the head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FromAgent {
    /// The agent runs and waits for its job.
    Ready(Ready),
    /// The agent has entered the folder that the head named, or could not. The text is the reason.
    Entered(Result<(), String>),
    /// Output of the job on this host.
    Output {
        is_stderr: bool,
        bytes: Vec<u8>,
    },
    /// The job cannot be started here. The text is the reason.
    Failed(String),
    /// The launcher on this host has ended: exit code, or the signal that killed it.
    Ended {
        code: Option<i32>,
        signal: Option<i32>,
    },
    Alive,
}

/// The first message of an agent, about its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ready {
    /// Version of the agent's program.
    pub(super) version: String,
    pub(super) host: String,
    /// Addresses of the host, those that other hosts most likely reach first.
    pub(super) addresses: Vec<String>,
}

/// A message of the head to an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ToAgent {
    /// Enter this folder, in which the job will run.
    Enter(Vec<u8>),
    Start(Start),
    /// Send this signal to the launcher.
    Signal(i32),
    Alive,
}

/// The job of one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Start {
    /// Arguments of the launcher.
    pub(super) arguments: Vec<Vec<u8>>,
    /// Variables to set over those of the host.
    pub(super) variables: Vec<(Vec<u8>, Vec<u8>)>,
}

/// The stream does not follow the protocol. The text says how.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct FrameError(pub(super) String);

/// Encodes a message as a frame: its length as 4 bytes, and the message.
pub(super) fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    let body = postcard::to_allocvec(message).expect("messages are plain data");
    let length = u32::try_from(body.len()).expect("output is cut into pieces far below 4 GiB");
    [&length.to_be_bytes()[..], &body].concat()
}

/// Decodes the frames of a stream.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    bytes: Vec<u8>,
    /// True if the frames have begun.
    has_begun: bool,
}

impl Decoder {
    /// Returns a decoder for a stream that begins with frames.
    pub(super) fn without_magic() -> Self {
        Self { bytes: Vec::new(), has_begun: true }
    }

    /// Adds bytes that have arrived.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the other text that the stream began with, if no frame has come.
    pub(super) fn noise(&self) -> String {
        if self.has_begun { String::new() } else { String::from_utf8_lossy(&self.bytes).into_owned() }
    }

    /// Returns true if this text is among the bytes that are not decoded yet.
    pub(super) fn contains(&self, text: &[u8]) -> bool {
        memchr::memmem::find(&self.bytes, text).is_some()
    }

    /// Returns the next message; `None` if it has not arrived completely.
    pub(super) fn next<T: for<'a> Deserialize<'a>>(&mut self) -> Result<Option<T>, FrameError> {
        if !self.has_begun {
            let Some(at) = memchr::memmem::find(&self.bytes, MAGIC) else {
                // The end may be the begin of the magic text.
                if self.bytes.len() > MAX_NOISE {
                    return Err(FrameError("it prints without end instead of starting convoke".to_owned()));
                }
                return Ok(None);
            };
            self.bytes.drain(..at + MAGIC.len());
            self.has_begun = true;
        }
        let Some((length, rest)) = self.bytes.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_be_bytes(*length) as usize;
        if length > MAX_FRAME {
            return Err(FrameError(format!("it sent a message of {length} bytes")));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let message = postcard::from_bytes(body);
        self.bytes.drain(..4 + length);
        message
            .map(Some)
            .map_err(|_| FrameError("it sent a message that this version does not know".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_are_found_behind_the_text_of_a_login_script() {
        let messages = [
            FromAgent::Output { is_stderr: true, bytes: vec![0, 255, b'\n'] },
            FromAgent::Ended { code: Some(3), signal: None },
        ];
        let frames = messages.iter().flat_map(encode);
        let stream: Vec<u8> = b"Welcome!\n\x01conv\n".iter().chain(MAGIC).copied().chain(frames).collect();
        for step in [1, 7, stream.len()] {
            let (mut decoder, mut got) = (Decoder::default(), Vec::new());
            for part in stream.chunks(step) {
                decoder.push(part);
                while let Some(message) = decoder.next::<FromAgent>().unwrap() {
                    got.push(message);
                }
            }
            assert_eq!(got, messages, "{step}");
        }
        let mut decoder = Decoder::default();
        decoder.push(b"sh: convoke: not found\n");
        assert_eq!(decoder.next::<FromAgent>(), Ok(None));
        assert_eq!(decoder.noise(), "sh: convoke: not found\n");
    }

    proptest! {
        #[test]
        fn any_bytes_are_messages_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::without_magic();
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next::<FromAgent>() {}
            let mut decoder = Decoder::without_magic();
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next::<ToAgent>() {}
        }
    }
}
