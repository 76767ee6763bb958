//! Strangers at the door and peers that go mad: real ranks against a hand-written one.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_env::{Generation, Token};
use convoke_store::{MemoryStore, Store};

use super::core::Engine;
use super::state::Settings;
use crate::call::{Call, CallKind};
use crate::dtype::{Dtype, ReduceOp};
use crate::error::CommError;
use crate::frame::{CONTROL_PAYLOAD_BYTES, Frame, HEADER_BYTES, Kind};
use crate::group::Group;
use crate::links::conn::Conn;
use crate::links::hello::{Credentials, Hello, Lane, Role, SUITE_PLAIN, Welcome};
use crate::links::tcp;
use crate::options::GroupOptions;
use crate::plan::Tuning;

const LONG: Duration = Duration::from_secs(60);
/// The rank that the tests play themselves: the highest, which connects to all others.
const FAKE: usize = 2;

fn generation() -> Generation {
    Generation::from_bytes([3; 16])
}

fn token() -> Token {
    Token::new(b"secret".to_vec())
}

fn credentials() -> Credentials {
    Credentials::new(Some(&token()), generation(), 0)
}

/// Two real ranks that wait for a third, and what it takes to be that.
struct Siege {
    store: Arc<dyn Store>,
    addresses: Vec<SocketAddr>,
    listener: tcp::Listener,
}

/// Starts ranks 0 and 1 with `body` in threads, and `attack` beside them.
fn siege<R: Send>(body: impl Fn(Result<Group, CommError>) -> R + Sync, attack: impl FnOnce(Siege)) -> Vec<R> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let listener = tcp::listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = listener.address().unwrap();
    let prefix = format!("convoke/default/{}", generation());
    let record = format!(
        "{{\"version\":1,\"rank\":2,\"size\":3,\"address\":\"{address}\",\"host\":\"\",\"pid\":1,\"tuning\":\"{}\",\
         \"token\":true}}",
        Tuning::default()
    );
    let soon = Instant::now() + LONG;
    store.set(format!("{prefix}/rank/2").as_bytes(), record.as_bytes(), soon).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let (store, body) = (Arc::clone(&store), &body);
                let options = GroupOptions::default().timeout(LONG).init_timeout(LONG);
                let options = options.generation(generation()).token(token());
                scope.spawn(move || body(Group::new(store, rank, 3, options)))
            })
            .collect();
        let table = store.get(format!("{prefix}/table").as_bytes(), soon).unwrap();
        let table: Vec<String> = serde_json::from_slice(&table).unwrap();
        let address = |text: &String| {
            let record: serde_json::Value = serde_json::from_str(text).unwrap();
            record["address"].as_str().unwrap().parse().unwrap()
        };
        let addresses = table.iter().map(address).collect();
        attack(Siege { store: Arc::clone(&store), addresses, listener });
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

impl Siege {
    /// A stranger's connection to a rank.
    fn call(&self, rank: usize) -> TcpStream {
        let stream = TcpStream::connect(self.addresses[rank]).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream
    }

    /// The real third rank, connected.
    fn engine(self) -> Engine {
        let settings = Settings {
            name: "default".to_owned(),
            me: FAKE,
            size: 3,
            credentials: credentials(),
            addresses: self.addresses,
            listener: self.listener,
            store: self.store,
            abort_key: b"unused".to_vec(),
            store_rank: None,
            agent: None,
            peer_timeout: Duration::from_secs(10),
            crowded: true,
        };
        let mut engine = Engine::new(settings).unwrap();
        let lanes: Vec<_> = (0..2).flat_map(|peer| Lane::ALL.map(|lane| (peer, lane))).collect();
        assert!(engine.connect(&lanes, Instant::now() + LONG).unwrap());
        engine
    }
}

fn frame(kind: Kind, len: usize) -> Frame {
    let (generation, call) = (generation(), [0; 16]);
    Frame { kind, generation, group: 0, seq: 0, call, len: len as u64 }
}

fn with(frame: Frame, payload: &[u8]) -> Vec<u8> {
    [&frame.encode()[..], payload].concat()
}

fn hello(source: usize, destination: usize) -> Hello {
    let (source, destination) = (source as u32, destination as u32);
    Hello { suite: SUITE_PLAIN, lane: Lane::Control, capabilities: 0, source, destination, nonce: [9; 32] }
}

fn greeting(source: usize, destination: usize) -> Vec<u8> {
    let hello = hello(source, destination).encode();
    with(frame(Kind::Hello, hello.len()), &hello)
}

/// Everything that comes until the connection is closed, as text.
fn answer(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset is a way to close.
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

fn read_welcome(stream: &mut TcpStream) -> Welcome {
    let mut bytes = [0; HEADER_BYTES + 72];
    stream.read_exact(&mut bytes).unwrap();
    Welcome::decode(&bytes[HEADER_BYTES..]).unwrap()
}

#[test]
fn strangers_are_turned_away_and_the_real_peers_still_connect() {
    let sums = siege(
        |group| {
            let group = group?;
            let mut sum = [1 << group.rank()];
            group.all_reduce(&mut sum, ReduceOp::Sum).map(|()| sum[0])
        },
        |siege| {
            let good = frame(Kind::Hello, 48);
            let patched = |index: usize, byte: u8| {
                let mut bytes = greeting(FAKE, 0);
                bytes[index] = byte;
                bytes
            };
            let other = Generation::from_bytes([4; 16]);
            let huge = Frame { len: 4000, ..good };
            // (what, bytes, part of the answer: none if it is no convoke process that asks)
            let cases: Vec<(&str, Vec<u8>, &str)> = vec![
                ("a web browser", b"GET / HTTP/1.1\r\n\r\n".to_vec(), ""),
                ("four bytes of garbage", vec![0xFF; 4], ""),
                ("another version", patched(4, 9), "version 9"),
                ("an unknown kind", patched(5, 200), "unknown frame kind 200"),
                ("reserved bits", patched(6, 1), "reserved bits"),
                ("an earlier round", with(Frame { generation: other, ..good }, &[0; 48]), "is not the"),
                ("another group", with(Frame { group: 7, ..good }, &[0; 48]), "group 7"),
                ("a huge hello", with(huge, &[0; 48]), "claims 4000 bytes"),
                ("a short hello", with(Frame { len: 47, ..good }, &[0; 47]), "a hello has 48 bytes"),
                ("an unknown suite", patched(HEADER_BYTES, 5), "security suite 5"),
                ("an unknown lane", patched(HEADER_BYTES + 1, 5), "unknown lane 5"),
                ("a rank that does not exist", greeting(99, 0), "no rank 99"),
                ("a rank that is called, not calling", greeting(0, 0), "the higher one does"),
                ("a call for another rank", greeting(FAKE, 1), "not rank 1"),
                ("data before a proof", with(frame(Kind::Data, 4), &[0; 4]), "before the proof"),
                ("an abort before a proof", with(frame(Kind::Abort, 0), &[]), "before the proof"),
                ("a proof without a hello", with(frame(Kind::Proof, 32), &[0; 32]), "before the proof"),
                ("a hello twice", [greeting(FAKE, 0), greeting(FAKE, 0)].concat(), "before the proof"),
            ];
            for (what, bytes, part) in cases {
                let mut stream = siege.call(0);
                stream.write_all(&bytes).unwrap();
                let answer = answer(stream);
                assert!(answer.contains(part), "{what}: {answer:?}");
                assert!(!part.is_empty() || answer.is_empty(), "{what} is answered: {answer:?}");
            }
            // A proof made with another token, and our own proof sent back to us.
            for reflected in [false, true] {
                let mut stream = siege.call(0);
                stream.write_all(&greeting(FAKE, 0)).unwrap();
                let welcome = read_welcome(&mut stream);
                let other = Credentials::new(Some(&Token::new(b"other".to_vec())), generation(), 0);
                let proof = match reflected {
                    true => welcome.proof,
                    false => other.prove(Role::Connector, &hello(FAKE, 0), 0, &welcome.nonce),
                };
                stream.write_all(&with(frame(Kind::Proof, 32), &proof)).unwrap();
                let answer = answer(stream);
                assert!(answer.contains("another token"), "{answer:?}");
            }
            // Cut off in the middle; silent in the middle; and far more silent ones than are let in.
            for cut in [1, 4, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 47] {
                siege.call(0).write_all(&greeting(FAKE, 0)[..cut]).unwrap();
            }
            let mut silent: Vec<_> = (0..300).map(|index| siege.call(index % 2)).collect();
            for (index, stream) in silent.iter_mut().enumerate() {
                // Those that were turned away already cannot be written to.
                let _ = stream.write_all(&greeting(FAKE, 0)[..index % HEADER_BYTES]);
            }
            let shared = super::Shared::new(siege.engine());
            assert_eq!(sum(&shared), 7);
            shared.close(Engine::leave);
        },
    );
    assert!(sums.iter().all(|sum| matches!(sum, Ok(7))), "{sums:?}");
}

/// What the third rank adds.
fn sum(shared: &super::Shared) -> i32 {
    let call =
        Call { kind: CallKind::AllReduce, dtype: Dtype::I32, op: Some(ReduceOp::Sum), root: 0, count: 1 };
    let rounding = call.rounding();
    let algorithm = Tuning::default().all_reduce(4, 3, rounding);
    let plan = Arc::new(crate::plan::all_reduce(algorithm, rounding, FAKE, 3, 1, 4));
    let kernel = crate::kernels::Kernel::of(Dtype::I32, ReduceOp::Sum, 3);
    let mut mine = [4_i32];
    let lent = super::Lent::default().filled(0, &mut mine);
    shared.call(super::Operation::Collective { call, plan, lent, kernel }, LONG).unwrap();
    mine[0]
}

/// What a mad third rank sends, on which lane, and what the error must say.
fn madness() -> Vec<(&'static str, Lane, Vec<u8>, &'static str)> {
    use Lane::{Collective, Control, Message};
    let p2p = |count: u64, tag: u32| {
        Call { kind: CallKind::PointToPoint, dtype: Dtype::U8, op: None, root: tag, count }.encode()
    };
    let eager = |count: u64, len: usize| {
        with(Frame { call: p2p(count, 0), ..frame(Kind::Eager, len) }, &[0; 64][..len.min(64)])
    };
    let noise: Vec<u8> = (0..200).map(|i: u32| (i * 37 + 11) as u8).collect();
    let other = Generation::from_bytes([4; 16]);
    vec![
        ("noise as data", Collective, noise.clone(), "not a convoke frame"),
        ("a message among data", Collective, with(frame(Kind::Eager, 0), &[]), "among the data"),
        (
            "an unknown call",
            Collective,
            with(Frame { call: [0xEE; 16], ..frame(Kind::Data, 4) }, &[]),
            "unknown",
        ),
        (
            "data of another round",
            Collective,
            with(Frame { generation: other, ..frame(Kind::Data, 4) }, &[]),
            "generation",
        ),
        ("noise as control", Control, noise.clone(), "not a convoke frame"),
        ("data as control", Control, with(frame(Kind::Data, 0), &[]), "on the control connection"),
        (
            "control of another group",
            Control,
            with(Frame { group: 5, ..frame(Kind::Goodbye, 0) }, &[]),
            "another generation or group",
        ),
        ("a report that is none", Control, with(frame(Kind::Abort, 5), b"{\"by\""), "malformed report"),
        ("a huge report", Control, with(frame(Kind::Abort, 5000), &[]), "claims 5000 bytes"),
        (
            "a state without a call",
            Control,
            with(Frame { call: [9; 16], ..frame(Kind::State, 0) }, &[]),
            "unknown",
        ),
        (
            "an unknown lane",
            Control,
            with(Frame { seq: 77, ..frame(Kind::Open, 0) }, &[]),
            "asks for lane 77",
        ),
        ("noise as messages", Message, noise, "not a convoke frame"),
        ("control among messages", Message, with(frame(Kind::Goodbye, 0), &[]), "among messages"),
        ("a length that is not that of the call", Message, eager(10, 11), "11 bytes for"),
        ("a small message that is large", Message, eager(1 << 20, 1 << 20), "bytes for"),
        ("a message nobody asked for", Message, with(frame(Kind::Message, 8), &[0; 8]), "was not asked for"),
        ("a request for nothing", Message, with(frame(Kind::Cts, 0), &[]), "does not wait"),
        (
            "credit from nowhere",
            Message,
            with(Frame { seq: 1, ..frame(Kind::Credit, 0) }, &[]),
            "credits 1 bytes",
        ),
        (
            "credit beyond counting",
            Message,
            with(Frame { seq: u64::MAX, ..frame(Kind::Credit, 0) }, &[]),
            "credits",
        ),
        (
            "more than it has credit for",
            Message,
            (0..20)
                .flat_map(|seq| {
                    with(Frame { seq, call: p2p(60_000, 0), ..frame(Kind::Eager, 60_000) }, &[0; 60_000])
                })
                .collect(),
            "more than it has credit for",
        ),
    ]
}

#[test]
fn a_peer_that_goes_mad_is_a_protocol_error_on_all_ranks() {
    for (what, lane, bytes, part) in madness() {
        let errors = siege(
            // It may happen while the group forms.
            |group| group.and_then(|group| group.all_reduce(&mut [1_i32], ReduceOp::Sum)).unwrap_err(),
            |siege| {
                let mut engine = siege.engine();
                let peer = &mut engine.peers[0];
                let conn = match lane {
                    Lane::Control => &mut peer.control,
                    Lane::Collective => &mut peer.collective,
                    Lane::Message => &mut peer.messages.conn,
                };
                send_all(conn.as_mut().unwrap(), &bytes);
                await_ends(&mut engine, what);
            },
        );
        for (rank, error) in errors.iter().enumerate() {
            assert!(matches!(error, CommError::Protocol { peer: FAKE, .. }), "{what}, rank {rank}: {error}");
            assert!(error.to_string().contains(part), "{what}, rank {rank}: {error}");
        }
    }
}

fn send_all(conn: &mut Conn, bytes: &[u8]) {
    let (mut sent, deadline) = (0, Instant::now() + LONG);
    while sent < bytes.len() {
        // The receiver may give up in the middle.
        match conn.send(&[std::io::IoSlice::new(&bytes[sent..])]) {
            Ok(some) => sent += some,
            Err(_) => return,
        }
        assert!(Instant::now() < deadline);
    }
}

/// Whether a peer has said Abort or closed. What it says before, such as what it waits in, is skipped.
fn has_ended(engine: &mut Engine, peer: usize) -> bool {
    let Some(control) = engine.peers[peer].control.as_mut() else { return true };
    let closed = control.fill(HEADER_BYTES + CONTROL_PAYLOAD_BYTES).is_err();
    while let Some(Ok(frame)) = control.unread().first_chunk::<HEADER_BYTES>().map(Frame::decode) {
        let end = HEADER_BYTES + frame.len as usize;
        if frame.kind == Kind::Abort {
            return true;
        }
        if control.unread().len() < end {
            break;
        }
        control.consume(end);
    }
    closed
}

#[test]
fn bools_are_true_or_false_whatever_a_peer_sends() {
    // Few enough to be read ahead, and so many that they are received straight into the buffer.
    const SHARED: [usize; 2] = [300, 60_000];
    const SENT: [usize; 2] = [300, 70_000];
    let hostile = |count: usize| (0..count).map(|i| (i % 256) as u8).collect::<Vec<u8>>();
    let call = |kind, op, root: usize, count: usize| {
        Call { kind, dtype: Dtype::Bool, op, root: root as u32, count: count as u64 }.encode()
    };
    let bytes_of = |buf: &[bool]| {
        // SAFETY: initialised memory may be read as bytes.
        #[allow(unsafe_code)]
        let bytes = unsafe { std::slice::from_raw_parts(buf.as_ptr().cast::<u8>(), buf.len()) };
        bytes.to_vec()
    };
    let outcomes = siege(
        |group| {
            let (group, mut seen) = (group.unwrap(), Vec::new());
            for count in SHARED {
                let mut buf = vec![false; count];
                group.broadcast(&mut buf, FAKE).unwrap();
                seen.push(bytes_of(&buf));
            }
            for count in SENT {
                let mut buf = vec![false; count];
                group.recv(&mut buf, FAKE, 0).unwrap();
                seen.push(bytes_of(&buf));
            }
            let mut buf = vec![false; SHARED[0]];
            group.all_reduce(&mut buf, ReduceOp::Sum).unwrap();
            seen.push(bytes_of(&buf));
            seen
        },
        |siege| {
            let mut engine = siege.engine();
            for peer in 0..2 {
                let peer = &mut engine.peers[peer];
                let (data, messages) =
                    (peer.collective.as_mut().unwrap(), peer.messages.conn.as_mut().unwrap());
                for (seq, count) in (0..).zip(SHARED) {
                    let call = call(CallKind::Broadcast, None, FAKE, count);
                    send_all(data, &with(Frame { seq, call, ..frame(Kind::Data, count) }, &hostile(count)));
                }
                let message = |kind, seq, count: usize, len: usize| Frame {
                    seq,
                    call: call(CallKind::PointToPoint, None, 0, count),
                    ..frame(kind, len)
                };
                send_all(messages, &with(message(Kind::Eager, 0, SENT[0], SENT[0]), &hostile(SENT[0])));
                send_all(messages, &with(message(Kind::Rts, 1, SENT[1], 0), &[]));
                await_frame(messages, Kind::Cts);
                send_all(messages, &with(message(Kind::Message, 1, SENT[1], SENT[1]), &hostile(SENT[1])));
                // Only one of them adds what the third rank has.
                let (count, call) = (SHARED[0], call(CallKind::AllReduce, Some(ReduceOp::Sum), 0, SHARED[0]));
                send_all(data, &with(Frame { seq: 2, call, ..frame(Kind::Data, count) }, &hostile(count)));
            }
            await_ends(&mut engine, "bools");
        },
    );
    for bytes in outcomes.iter().flatten() {
        assert!(bytes.iter().enumerate().all(|(i, &byte)| byte == u8::from(i % 256 != 0)), "{bytes:?}");
    }
}

/// Reads until a frame of this kind has come.
fn await_frame(conn: &mut Conn, kind: Kind) {
    let deadline = Instant::now() + LONG;
    loop {
        conn.fill(HEADER_BYTES).unwrap();
        if let Some(header) = conn.unread().first_chunk::<HEADER_BYTES>() {
            let found = Frame::decode(header).unwrap().kind;
            conn.consume(HEADER_BYTES);
            if found == kind {
                return;
            }
        }
        assert!(Instant::now() < deadline, "no {kind:?}");
        std::thread::yield_now();
    }
}

/// Stays until both peers have given up or left.
fn await_ends(engine: &mut Engine, what: &str) {
    let deadline = Instant::now() + LONG;
    while !(0..2).all(|peer| has_ended(engine, peer)) {
        assert!(Instant::now() < deadline, "{what}: nobody noticed");
        std::thread::yield_now();
    }
}
