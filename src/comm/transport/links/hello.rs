//! The handshake by which two ranks prove to each other that they belong to one group. Pure.
//!
//! ```text
//! connector → acceptor   Hello     connection kind, source, destination, nonce
//! acceptor → connector   Welcome   nonce, proof
//! connector → acceptor   Proof     proof
//! ```
//!
//! A proof is HMAC-SHA256, keyed by the job's secret, of the sender's role (connector or acceptor) and of all
//! handshake bytes that were sent before it. So a proof cannot be reflected, replayed, or moved to another
//! connection, group, rank or generation. The handshake keeps out stale workers, other jobs and
//! unauthenticated peers; it does not encrypt later data. The field `suite` names the cryptography, so that
//! another suite can be added without a new format.

use convoke_env::{Generation, Token};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::transport::frame::{FrameError, GroupId, Kind, VERSION, bytes_at};

/// The suite with HMAC-SHA256 proofs, and no encryption of the bytes after the handshake.
pub(crate) const SUITE_PLAIN: u8 = 0;
/// Bit set of the optional protocol features of this version: none yet.
pub(crate) const CAPABILITIES: u32 = 0;

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ConnectionKind {
    /// Aborts, goodbyes and state queries. These short frames never wait behind data. Each pair of ranks has
    /// one control connection.
    Control,
    /// Data of collectives.
    Collective,
    /// Point-to-point messages.
    Message,
}

impl ConnectionKind {
    pub(crate) const ALL: [Self; 3] = [Self::Control, Self::Collective, Self::Message];

    pub(crate) const fn to_wire(self) -> u8 {
        self as u8
    }

    pub(crate) fn from_wire(number: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }
}

pub(crate) type Nonce = [u8; 32];
pub(crate) type Mac32 = [u8; 32];

/// Payload of a Hello frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) suite: u8,
    pub(crate) conn_kind: ConnectionKind,
    pub(crate) capabilities: u32,
    pub(crate) source: u32,
    pub(crate) destination: u32,
    pub(crate) nonce: Nonce,
}

/// Size of a [`Hello`] on the wire.
pub(crate) const HELLO_BYTES: usize = 48;
/// Size of a Welcome payload: suite, three reserved bytes, capabilities, nonce, proof.
pub(crate) const WELCOME_BYTES: usize = 72;

impl Hello {
    pub(crate) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[0] = self.suite;
        out[1] = self.conn_kind.to_wire();
        out[4..8].copy_from_slice(&self.capabilities.to_le_bytes());
        out[8..12].copy_from_slice(&self.source.to_le_bytes());
        out[12..16].copy_from_slice(&self.destination.to_le_bytes());
        out[16..48].copy_from_slice(&self.nonce);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, HandshakeError> {
        let wrong_len = |_| HandshakeError::HelloLength(bytes.len());
        let bytes: &[u8; HELLO_BYTES] = bytes.try_into().map_err(wrong_len)?;
        if bytes[0] != SUITE_PLAIN {
            return Err(HandshakeError::Suite(bytes[0]));
        }
        let conn_kind = ConnectionKind::from_wire(bytes[1].into());
        Ok(Self {
            suite: bytes[0],
            conn_kind: conn_kind.ok_or(HandshakeError::ConnectionKind(bytes[1]))?,
            capabilities: u32::from_le_bytes(bytes_at(bytes, 4)),
            source: u32::from_le_bytes(bytes_at(bytes, 8)),
            destination: u32::from_le_bytes(bytes_at(bytes, 12)),
            nonce: bytes_at(bytes, 16),
        })
    }
}

/// Payload of a Welcome frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Welcome {
    pub(crate) suite: u8,
    pub(crate) capabilities: u32,
    pub(crate) nonce: Nonce,
    pub(crate) proof: Mac32,
}

impl Welcome {
    pub(crate) fn encode(&self) -> [u8; WELCOME_BYTES] {
        let mut out = [0; WELCOME_BYTES];
        out[0] = self.suite;
        out[4..8].copy_from_slice(&self.capabilities.to_le_bytes());
        out[8..40].copy_from_slice(&self.nonce);
        out[40..72].copy_from_slice(&self.proof);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, HandshakeError> {
        let wrong_len = |_| HandshakeError::WelcomeLength(bytes.len());
        let bytes: &[u8; WELCOME_BYTES] = bytes.try_into().map_err(wrong_len)?;
        if bytes[0] != SUITE_PLAIN {
            return Err(HandshakeError::Suite(bytes[0]));
        }
        let capabilities = u32::from_le_bytes(bytes_at(bytes, 4));
        Ok(Self { suite: bytes[0], capabilities, nonce: bytes_at(bytes, 8), proof: bytes_at(bytes, 40) })
    }
}

/// The reason why a handshake fails, as seen by the rank that ends the handshake.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("generation {}, group {} is not generation {}, group {} of this rank", theirs.0, theirs.1, ours.0, ours.1)]
    ForeignGroup { theirs: GroupId, ours: GroupId },
    #[error("a hello has {HELLO_BYTES} bytes, not {0}")]
    HelloLength(usize),
    #[error("a welcome has {WELCOME_BYTES} bytes, not {0}")]
    WelcomeLength(usize),
    #[error("unknown security suite {0}")]
    Suite(u8),
    #[error("unknown connection kind {0}")]
    ConnectionKind(u8),
    #[error("this is rank {me}, not rank {destination}")]
    WrongDestination { me: usize, destination: usize },
    #[error("there is no rank {source_rank} in a group of {size}")]
    UnknownSource { source_rank: usize, size: usize },
    #[error("rank {source_rank} must not connect to rank {me}: the higher rank opens the connection")]
    WrongDirection { source_rank: usize, me: usize },
    #[error("it sent a {0:?} frame before the proof")]
    BeforeProof(Kind),
    #[error("rank {source_rank} has another token")]
    WrongToken { source_rank: u32 },
    #[error(
        "rank {source_rank} closed the connection after the answer of this rank: does it have another token?"
    )]
    ClosedAfterWelcome { source_rank: u32 },
    #[error("it answered a hello with a {0:?} frame")]
    NoWelcome(Kind),
    /// The proof of the accepting rank is wrong.
    #[error("its proof of the token is wrong: does it have another token?")]
    WrongProof,
    #[error("{0}")]
    NoRandomNumbers(String),
}

/// The role of the sender in the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Connector,
    Acceptor,
}

/// The key for the handshake proofs of a group, and the generation and group id that every proof covers.
#[derive(Debug, Clone)]
pub(crate) struct Credentials {
    key: Vec<u8>,
    pub(crate) generation: Generation,
    pub(crate) group: u64,
}

impl Credentials {
    /// Makes credentials keyed by the job's token. Without a token (open mode) the generation is the key.
    /// That key keeps out processes that connect by accident, but nobody who can read the store.
    pub(crate) fn new(token: Option<&Token>, generation: Generation, group: u64) -> Self {
        let key = token.map_or_else(|| generation.to_bytes().to_vec(), |token| token.as_bytes().to_vec());
        Self { key, generation, group }
    }

    pub(crate) fn group_id(&self) -> GroupId {
        (self.generation, self.group)
    }

    /// Returns the credentials of another group of this generation.
    pub(crate) fn of_group(&self, group: u64) -> Self {
        Self { group, ..self.clone() }
    }

    /// Returns the proof that the rank in `role` sends. It covers `hello`, and `capabilities` and `nonce` of
    /// the acceptor's answer.
    pub(crate) fn prove(&self, role: Role, hello: &Hello, capabilities: u32, nonce: &Nonce) -> Mac32 {
        self.mac(role, hello, capabilities, nonce).finalize().into_bytes().into()
    }

    /// Returns true if `proof` is the proof of the rank in `role`. The time that this takes does not depend
    /// on which bytes are wrong.
    pub(crate) fn verify(
        &self,
        role: Role,
        hello: &Hello,
        capabilities: u32,
        nonce: &Nonce,
        proof: &[u8],
    ) -> bool {
        self.mac(role, hello, capabilities, nonce).verify_slice(proof).is_ok()
    }

    fn mac(&self, role: Role, hello: &Hello, capabilities: u32, nonce: &Nonce) -> Hmac<Sha256> {
        let mut mac: Hmac<Sha256> =
            KeyInit::new_from_slice(&self.key).expect("HMAC takes keys of any length");
        mac.update(match role {
            Role::Connector => b"convoke connector",
            Role::Acceptor => b"convoke acceptor\0",
        });
        mac.update(&[VERSION]);
        mac.update(&self.generation.to_bytes());
        mac.update(&self.group.to_le_bytes());
        mac.update(&hello.encode());
        mac.update(&capabilities.to_le_bytes());
        mac.update(nonce);
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        let (conn_kind, nonce) = (ConnectionKind::Message, [7; 32]);
        Hello { suite: SUITE_PLAIN, conn_kind, capabilities: 5, source: 1, destination: 2, nonce }
    }

    fn credentials(token: &[u8]) -> Credentials {
        Credentials::new(Some(&Token::new(token.to_vec())), Generation::from_bytes([1; 16]), 0)
    }

    #[test]
    fn payloads_round_trip() {
        assert_eq!(Hello::decode(&hello().encode()), Ok(hello()));
        let welcome = Welcome { suite: SUITE_PLAIN, capabilities: 9, nonce: [1; 32], proof: [2; 32] };
        assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
        assert!(Hello::decode(&hello().encode()[1..]).is_err());
        assert!(Welcome::decode(&[9; WELCOME_BYTES]).is_err());
    }

    /// These are the bytes of protocol version 3. A change to them must raise the version.
    #[test]
    fn payloads_of_this_version_have_these_bytes() {
        let nonce = std::array::from_fn(|index| 0x40 + index as u8);
        let hello = Hello {
            suite: SUITE_PLAIN,
            conn_kind: ConnectionKind::Message,
            capabilities: 0x0403_0201,
            source: 0x1413_1211,
            destination: 0x2423_2221,
            nonce,
        };
        let words = [0, 2, 0, 0, 1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14, 0x21, 0x22, 0x23, 0x24];
        let bytes = [&words[..], &nonce].concat();
        assert_eq!(hello.encode()[..], bytes);
        assert_eq!(Hello::decode(&bytes), Ok(hello));
        let proof = std::array::from_fn(|index| 0x80 + index as u8);
        let welcome = Welcome { suite: SUITE_PLAIN, capabilities: 0x0403_0201, nonce, proof };
        let bytes = [&[0, 0, 0, 0, 1, 2, 3, 4][..], &nonce, &proof].concat();
        assert_eq!(welcome.encode()[..], bytes);
        assert_eq!(Welcome::decode(&bytes), Ok(welcome));
        assert_eq!(ConnectionKind::ALL.map(ConnectionKind::to_wire), [0, 1, 2]);
    }

    /// The proofs were computed from the text at the head of this file, with Python's `hmac`.
    #[test]
    fn proofs_of_this_version_have_these_bytes() {
        let text = |proof: Mac32| proof.map(|byte| format!("{byte:02x}")).concat();
        let proof = |credentials: &Credentials, role| text(credentials.prove(role, &hello(), 9, &[3; 32]));
        let ours = credentials(b"secret");
        assert_eq!(
            proof(&ours, Role::Connector),
            "98196e8a48c08fc2f420852ff98611e0043e1a7a4e074b6f51abd2f70d41a616"
        );
        assert_eq!(
            proof(&ours, Role::Acceptor),
            "5383b265927d1741cab6b84118035aa61580cf021116d60ad33a51713c4c56d4"
        );
        let open = Credentials::new(None, Generation::from_bytes([1; 16]), 0);
        assert_eq!(
            proof(&open, Role::Connector),
            "150feaca2785b4c81c931fa579971cde68e460bccc43c5ae7bc1b3c712307a3e"
        );
    }

    #[test]
    fn random_payloads_never_cause_a_panic() {
        let (test, most) = ("random_payloads_never_cause_a_panic", 1000);
        let decode = |bytes: &[u8]| Hello::decode(bytes).ok();
        convoke_testkit::fuzz(test, &[hello().encode()], most, decode, |hello| hello.encode().to_vec());
        let welcome = Welcome { suite: SUITE_PLAIN, capabilities: 9, nonce: [1; 32], proof: [2; 32] };
        let decode = |bytes: &[u8]| Welcome::decode(bytes).ok();
        convoke_testkit::fuzz(test, &[welcome.encode()], most, decode, |welcome| welcome.encode().to_vec());
        let ours = credentials(b"secret");
        let proof = ours.prove(Role::Connector, &hello(), 0, &[3; 32]);
        let decode = |proof: &[u8]| ours.verify(Role::Connector, &hello(), 0, &[3; 32], proof).then_some(());
        convoke_testkit::fuzz(test, &[proof], most, decode, |()| proof.to_vec());
    }

    #[test]
    fn proof_covers_the_whole_handshake() {
        let nonce = [3; 32];
        let ours = credentials(b"secret");
        let proof = ours.prove(Role::Connector, &hello(), 0, &nonce);
        let holds = |credentials: &Credentials, role, hello: &Hello, capabilities, nonce: &Nonce| {
            credentials.verify(role, hello, capabilities, nonce, &proof)
        };
        assert!(holds(&ours, Role::Connector, &hello(), 0, &nonce));
        assert!(!holds(&ours, Role::Acceptor, &hello(), 0, &nonce));
        assert!(!holds(&ours, Role::Connector, &hello(), 1, &nonce));
        assert!(!holds(&ours, Role::Connector, &hello(), 0, &[4; 32]));
        assert!(!holds(&credentials(b"other"), Role::Connector, &hello(), 0, &nonce));
        assert!(!ours.verify(Role::Connector, &hello(), 0, &nonce, &proof[1..]));
        for changed in [
            Hello { conn_kind: ConnectionKind::Control, ..hello() },
            Hello { source: 3, ..hello() },
            Hello { destination: 3, ..hello() },
            Hello { nonce: [8; 32], ..hello() },
        ] {
            assert!(!holds(&ours, Role::Connector, &changed, 0, &nonce));
        }
        for (generation, group) in [([2; 16], 0), ([1; 16], 1)] {
            let token = Token::new(b"secret".to_vec());
            let other = Credentials::new(Some(&token), Generation::from_bytes(generation), group);
            assert!(!holds(&other, Role::Connector, &hello(), 0, &nonce));
        }
    }
}
