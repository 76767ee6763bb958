//! Wire format between agents and their coordinator. Pure.
//!
//! ```text
//! agent → coordinator   "convoke", version
//!                       Hello     run id, agent, nonce
//! coordinator → agent   Welcome   nonce, proof; or Refused
//! agent → coordinator   Proof     proof, profile
//!                       Status ...
//! coordinator → agent   Order ...
//! ```
//!
//! A frame is a length (4 bytes, little endian), a body, and 32 bytes of HMAC-SHA256 over direction, frame
//! number and body. The key is derived from the job's token (empty in open mode, if the user set none), the
//! contents of Hello and Welcome, and both nonces. An unauthenticated peer therefore cannot forge, replay,
//! reflect, reorder or drop a frame. Nothing is encrypted. `suite` names the cryptography, so that the
//! cryptography can change without a new format.

use convoke_env::Token;
use hmac::{Hmac, KeyInit, Mac};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::membership::{AgentId, OrderMessage, Profile, Status};

/// First bytes of a connection; the last one is the version. (The first byte of a TCPStore client is 0.)
pub(super) const MAGIC: [u8; 8] = *b"convoke\x05";
/// HMAC-SHA256 without encryption.
pub(super) const SUITE: u8 = 0;
/// Maximum body length, in bytes, before the sender has authenticated itself.
pub(super) const UNAUTHENTICATED_FRAME_LIMIT: usize = 2048;
/// Maximum body length, in bytes, after authentication. The largest body is a failure report.
pub(super) const FRAME_LIMIT: usize = 1 << 20;
pub(super) const LENGTH_BYTES: usize = 4;
pub(super) const MAC_BYTES: usize = 32;

pub(super) type Nonce = [u8; 32];

/// First frame that an agent sends to the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) suite: u8,
    pub(super) run_id: String,
    pub(super) agent: AgentId,
    pub(super) nonce: Nonce,
}

/// Answer of the coordinator to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Welcome {
    /// The MAC of the next frame proves that the coordinator knows the token. `credential` is the token as a MUNGE
    /// credential. Only processes of the coordinator's user can decode it. It is `None` if the user has set a token,
    /// or if the job has none.
    Welcome { suite: u8, nonce: Nonce, credential: Option<String> },
    /// The coordinator refuses the connection. The text is the reason.
    Refused(String),
}

/// Messages of an authenticated agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ToCoordinator {
    Profile(Profile),
    Status(Status),
}

/// Messages of the coordinator to a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ToMember {
    Order(OrderMessage),
}

/// Reason for which a frame is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum WireError {
    #[error("a frame has {len} bytes, {limit} are allowed")]
    TooLong { len: usize, limit: usize },
    #[error("a frame failed authentication: is CONVOKE_TOKEN the same on all nodes?")]
    Forged,
    #[error("a frame is invalid: {0}")]
    Malformed(String),
}

/// Sender of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Agent,
    Coordinator,
}

/// Key and frame counter of one direction of a connection. It adds the MAC to frames that are sent, or
/// verifies the MAC of frames that are received, in order.
#[derive(Debug, Clone)]
pub(super) struct Seal {
    key: [u8; MAC_BYTES],
    from: Side,
    count: u64,
}

impl Hello {
    pub(super) fn new(run_id: &str, agent: AgentId, nonce: Nonce) -> Self {
        Self { suite: SUITE, run_id: run_id.to_owned(), agent, nonce }
    }
}

/// Returns the seals of both directions of a connection: for frames of the agent, and for frames of the
/// coordinator. `nonce` is that of the coordinator.
pub(super) fn seals(token: Option<&Token>, hello: &Hello, nonce: &Nonce) -> (Seal, Seal) {
    let mut mac = new_hmac(token.map_or(&[][..], Token::as_bytes));
    mac.update(&MAGIC);
    mac.update(&encode(hello));
    mac.update(nonce);
    let key: [u8; MAC_BYTES] = mac.finalize().into_bytes().into();
    (Seal { key, from: Side::Agent, count: 0 }, Seal { key, from: Side::Coordinator, count: 0 })
}

fn new_hmac(key: &[u8]) -> Hmac<Sha256> {
    Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length")
}

impl Seal {
    fn mac(&mut self, body: &[u8]) -> Hmac<Sha256> {
        let mut mac = new_hmac(&self.key);
        mac.update(&[self.from as u8]);
        mac.update(&self.count.to_le_bytes());
        mac.update(body);
        self.count += 1;
        mac
    }

    /// Encodes `body` and returns the next frame with its MAC, ready to send.
    pub(super) fn seal(&mut self, body: &impl Serialize) -> Vec<u8> {
        let body = encode(body);
        let mac = self.mac(&body).finalize().into_bytes();
        let mut frame = frame(&body);
        frame.extend_from_slice(&mac);
        frame
    }

    /// Verifies the next frame and returns its decoded body. `mac` is the MAC that follows `body`.
    pub(super) fn open<T: DeserializeOwned>(&mut self, body: &[u8], mac: &[u8]) -> Result<T, WireError> {
        self.mac(body).verify_slice(mac).map_err(|_| WireError::Forged)?;
        decode(body)
    }
}

/// Returns a frame without MAC, for messages that are sent before both sides know the key.
pub(super) fn frame(body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).expect("no message comes near 4 GiB");
    let mut frame = Vec::with_capacity(LENGTH_BYTES + body.len() + MAC_BYTES);
    frame.extend_from_slice(&len.to_le_bytes());
    frame.extend_from_slice(body);
    frame
}

/// Decodes the length field of a frame, which is the number of bytes of its body. More than `limit` is an
/// error.
pub(super) fn body_len(length: [u8; LENGTH_BYTES], limit: usize) -> Result<usize, WireError> {
    let len = u32::from_le_bytes(length) as usize;
    if len > limit { Err(WireError::TooLong { len, limit }) } else { Ok(len) }
}

pub(super) fn encode(body: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(body).expect("messages are plain data")
}

pub(super) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, WireError> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(WireError::Malformed(format!("{} bytes too many", rest.len()))),
        Err(error) => Err(WireError::Malformed(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::membership::{Departure, Failure, Order, Phase};

    fn hello() -> Hello {
        Hello::new("job", AgentId(7), [1; 32])
    }

    fn token(text: &str) -> Option<Token> {
        Some(Token::new(text.as_bytes().to_vec()))
    }

    fn status() -> ToCoordinator {
        let failure = Failure {
            summary: "rank 3 exited with 1".to_owned(),
            report: "{}".to_owned(),
            can_restart: false,
        };
        let phase = Phase::Failed { round: 2, failure };
        ToCoordinator::Status(Status { seq: 9, phase, last_order: (1, 4), last_probe: 2, answered: 8 })
    }

    fn split(frame: &[u8]) -> (&[u8], &[u8]) {
        let body = &frame[LENGTH_BYTES..];
        body.split_at(body.len() - MAC_BYTES)
    }

    #[test]
    fn sealed_messages_open_once_and_in_order() {
        let (mut agent, _) = seals(token("x").as_ref(), &hello(), &[2; 32]);
        let (mut reader, mut other_way) = seals(token("x").as_ref(), &hello(), &[2; 32]);
        let frames = [agent.seal(&status()), agent.seal(&status())];
        let (body, mac) = split(&frames[0]);
        assert_eq!(reader.open::<ToCoordinator>(body, mac), Ok(status()));
        assert_eq!(reader.open::<ToCoordinator>(body, mac), Err(WireError::Forged), "said again");
        let (body, mac) = split(&frames[1]);
        assert_eq!(reader.open::<ToCoordinator>(body, mac), Err(WireError::Forged), "one was left out");
        let (body, mac) = split(&frames[0]);
        assert_eq!(other_way.open::<ToCoordinator>(body, mac), Err(WireError::Forged), "reflected");
    }

    #[test]
    fn messages_for_another_token_nonce_job_or_agent_are_refused() {
        let (mut agent, _) = seals(token("x").as_ref(), &hello(), &[2; 32]);
        let sealed = agent.seal(&status());
        let (body, mac) = split(&sealed);
        let other_run = Hello { run_id: "other".to_owned(), ..hello() };
        let other_agent = Hello { agent: AgentId(8), ..hello() };
        for (mut reader, _) in [
            seals(token("y").as_ref(), &hello(), &[2; 32]),
            seals(None, &hello(), &[2; 32]),
            seals(token("x").as_ref(), &hello(), &[3; 32]),
            seals(token("x").as_ref(), &other_run, &[2; 32]),
            seals(token("x").as_ref(), &other_agent, &[2; 32]),
        ] {
            assert_eq!(reader.open::<ToCoordinator>(body, mac), Err(WireError::Forged));
        }
    }

    proptest! {
        #[test]
        fn damaged_or_random_messages_are_decoded_or_refused(
            random in prop::collection::vec(any::<u8>(), 0..300), flip in any::<prop::sample::Index>(), cut in any::<prop::sample::Index>(),
        ) {
            let _ = decode::<ToCoordinator>(&random);
            let _ = decode::<ToMember>(&random);
            let _ = decode::<Hello>(&random);
            let _ = decode::<Welcome>(&random);
            let order = Order::Refuse(crate::membership::Refusal::Evicted { silent_s: 3 });
            let order = OrderMessage { term: 1, seq: 2, order: Some(order), last_status: 3, probe: 4 };
            for body in [encode(&status()), encode(&ToMember::Order(order)), encode(&Phase::Left(Departure::Ended))] {
                let mut damaged = body.clone();
                let at = flip.index(damaged.len());
                damaged[at] ^= 1 << (at % 8);
                let _ = decode::<ToCoordinator>(&damaged);
                let _ = decode::<ToMember>(&damaged);
            }
            let body = encode(&status());
            prop_assert!(decode::<ToCoordinator>(&body[..cut.index(body.len())]).is_err());
        }

        #[test]
        fn damaged_frame_is_reported_as_forged(flip in any::<prop::sample::Index>()) {
            let (mut agent, _) = seals(None, &hello(), &[2; 32]);
            let mut sealed = agent.seal(&status());
            let at = LENGTH_BYTES + flip.index(sealed.len() - LENGTH_BYTES);
            sealed[at] ^= 1;
            let (body, mac) = split(&sealed);
            let (mut reader, _) = seals(None, &hello(), &[2; 32]);
            prop_assert_eq!(reader.open::<ToCoordinator>(body, mac), Err(WireError::Forged));
        }
    }

    #[test]
    fn length_beyond_the_limit_is_refused_before_reading() {
        assert_eq!(body_len(2048_u32.to_le_bytes(), UNAUTHENTICATED_FRAME_LIMIT), Ok(2048));
        let too_long = WireError::TooLong { len: 2049, limit: UNAUTHENTICATED_FRAME_LIMIT };
        assert_eq!(body_len(2049_u32.to_le_bytes(), UNAUTHENTICATED_FRAME_LIMIT), Err(too_long));
    }
}
