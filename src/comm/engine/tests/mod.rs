//! Unauthenticated and misbehaving peers: real ranks against a scripted peer. In `byzantine` the peer
//! misbehaves after it has authenticated, in `scripted_acceptor` it accepts the connections, and in
//! `departed_peer` it leaves without having read.

mod byzantine;
mod departed_peer;
mod faulty_link;
mod memory_unavailable;
mod panicked_driver;
mod scripted_acceptor;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use convoke_env::{Generation, Token};
use convoke_store::{MemoryStore, Store};

use super::Engine;
use super::Settings;
use super::{CorePlace, CoreSharing, Oversubscription};
use crate::api::group::Group;
use crate::bootstrap::options::GroupOptions;
use crate::collectives::call::{Call, CallKind};
use crate::collectives::dtype::{Dtype, ReduceOp};
use crate::collectives::plan::{Algorithms, Input, Rounding, Topology};
use crate::error::CommError;
use crate::flight::FlightRecorder;
use crate::shm::single_copy::{SingleCopy, SingleCopyPolicy};
use crate::transport::frame::{Frame, HEADER_BYTES, Kind, VERSION};
use crate::transport::links::hello::{ConnectionKind, Credentials, Hello, Role, SUITE_PLAIN, Welcome};
use crate::transport::links::tcp;

const LONG: Duration = Duration::from_secs(60);
/// The rank that the test plays: the highest rank, which opens the connections to all other ranks.
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

/// Two real ranks that wait for a third, and all that a test needs to play the third.
struct ScriptedPeer {
    store: Arc<dyn Store>,
    addresses: Vec<SocketAddr>,
    listener: tcp::Listener,
}

/// Runs `body` on ranks 0 and 1 in threads, and concurrently `attack` as the third rank.
fn with_scripted_peer<R: Send>(
    body: impl Fn(Result<Group, CommError>) -> R + Sync,
    attack: impl FnOnce(ScriptedPeer),
) -> Vec<R> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let listener = tcp::listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = listener.address().unwrap();
    let prefix = format!("convoke/default/{}", generation());
    let record = format!(
        "{{\"version\":{VERSION},\"rank\":2,\"size\":3,\"address\":\"{address}\",\"host\":\"\",\"pid\":1,\"tuning\":\"{}\",\
         \"token\":true,\"memory\":true}}",
        Algorithms::default()
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
        attack(ScriptedPeer { store: Arc::clone(&store), addresses, listener });
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

impl ScriptedPeer {
    /// Opens an unauthenticated connection to a rank.
    fn call(&self, rank: usize) -> TcpStream {
        let stream = TcpStream::connect(self.addresses[rank]).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream
    }

    /// Returns the engine of a real third rank, connected to ranks 0 and 1.
    fn engine(self) -> Engine {
        let settings = Settings {
            name: "default".to_owned(),
            me: FAKE,
            size: 3,
            credentials: credentials(),
            addresses: self.addresses,
            store: self.store,
            abort_key: b"unused".to_vec(),
            store_rank: None,
            peer_timeout: Duration::from_secs(10),
            sharing: CoreSharing {
                oversubscription: Oversubscription::Cores,
                place: Some(CorePlace { index: 0, ranks: 3 }),
                leaves_shared_core: false,
            },
            single_copy: SingleCopyPolicy { setting: SingleCopy::Auto, is_oversubscribed: true },
            flight: Arc::new(FlightRecorder::for_process().group("default", 0, None, (FAKE, 3), &[0, 1, 2])),
        };
        let mut engine = Engine::new(settings, None, Some(self.listener)).unwrap();
        let connections: Vec<_> =
            (0..2).flat_map(|peer| ConnectionKind::ALL.map(|conn_kind| (peer, conn_kind))).collect();
        assert!(engine.connect(&connections, Instant::now() + LONG).unwrap());
        engine
    }
}

fn frame(kind: Kind, len: usize) -> Frame {
    let (generation, call) = (generation(), [0; 16]);
    Frame { kind, credit: 0, generation, group: 0, seq: 0, call, len: len as u64, address: 0 }
}

fn with(frame: Frame, payload: &[u8]) -> Vec<u8> {
    [&frame.encode()[..], payload].concat()
}

fn hello(source: usize, destination: usize) -> Hello {
    let (source, destination) = (source as u32, destination as u32);
    Hello {
        suite: SUITE_PLAIN,
        conn_kind: ConnectionKind::Control,
        capabilities: 0,
        source,
        destination,
        nonce: [9; 32],
    }
}

fn greeting(source: usize, destination: usize) -> Vec<u8> {
    let hello = hello(source, destination).encode();
    with(frame(Kind::Hello, hello.len()), &hello)
}

/// Returns all bytes that arrive until the connection is closed, as text.
fn answer(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset closes the connection too.
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

fn read_welcome(stream: &mut TcpStream) -> Welcome {
    let mut bytes = [0; HEADER_BYTES + 72];
    stream.read_exact(&mut bytes).unwrap();
    Welcome::decode(&bytes[HEADER_BYTES..]).unwrap()
}

#[test]
fn unauthenticated_peers_are_refused_and_real_peers_still_connect() {
    let sums = with_scripted_peer(
        |group| {
            let group = group?;
            let mut sum = [1 << group.rank()];
            group.all_reduce(&mut sum, ReduceOp::Sum).map(|()| sum[0])
        },
        |peer| {
            let good = frame(Kind::Hello, 48);
            let patched = |index: usize, byte: u8| {
                let mut bytes = greeting(FAKE, 0);
                bytes[index] = byte;
                bytes
            };
            let other = Generation::from_bytes([4; 16]);
            let huge = Frame { len: 4000, ..good };
            // (case, bytes, part of the answer; it is empty if the sender is no convoke process)
            let cases: Vec<(&str, Vec<u8>, &str)> = vec![
                ("a web browser", b"GET / HTTP/1.1\r\n\r\n".to_vec(), ""),
                ("four bytes of garbage", vec![0xFF; 4], ""),
                ("another version", patched(4, 9), "version 9"),
                ("an unknown kind", patched(5, 200), "unknown frame kind 200"),
                ("reserved bits", patched(6, 1), "reserved bits"),
                (
                    "an earlier round",
                    with(Frame { generation: other, ..good }, &[0; 48]),
                    "is not generation",
                ),
                ("another group", with(Frame { group: 7, ..good }, &[0; 48]), "group 7"),
                ("a huge hello", with(huge, &[0; 48]), "claims 4000 bytes"),
                ("a short hello", with(Frame { len: 47, ..good }, &[0; 47]), "a hello has 48 bytes"),
                ("an unknown suite", patched(HEADER_BYTES, 5), "security suite 5"),
                ("an unknown connection kind", patched(HEADER_BYTES + 1, 5), "unknown connection kind 5"),
                ("a rank that does not exist", greeting(99, 0), "no rank 99"),
                (
                    "a rank that is called, not calling",
                    greeting(0, 0),
                    "the higher rank opens the connection",
                ),
                ("a call for another rank", greeting(FAKE, 1), "not rank 1"),
                ("data before a proof", with(frame(Kind::Data, 4), &[0; 4]), "before the proof"),
                ("an abort before a proof", with(frame(Kind::Abort, 0), &[]), "before the proof"),
                ("a proof without a hello", with(frame(Kind::Proof, 32), &[0; 32]), "before the proof"),
                ("a hello twice", [greeting(FAKE, 0), greeting(FAKE, 0)].concat(), "before the proof"),
            ];
            for (what, bytes, part) in cases {
                let mut stream = peer.call(0);
                stream.write_all(&bytes).unwrap();
                let answer = answer(stream);
                assert!(answer.contains(part), "{what}: {answer:?}");
                assert!(!part.is_empty() || answer.is_empty(), "{what} is answered: {answer:?}");
            }
            // The peer sends a proof made with another token, or the rank's own proof back to it.
            for reflected in [false, true] {
                let mut stream = peer.call(0);
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
            // These peers close their connections in the middle of a frame. Then 300 peers, more than are
            // accepted, stop in the middle of a frame and keep their connections open.
            for cut in [1, 4, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 47] {
                peer.call(0).write_all(&greeting(FAKE, 0)[..cut]).unwrap();
            }
            let mut silent: Vec<_> = (0..300).map(|index| peer.call(index % 2)).collect();
            for (index, stream) in silent.iter_mut().enumerate() {
                // Writing to a connection that was refused already fails.
                let _ = stream.write_all(&greeting(FAKE, 0)[..index % HEADER_BYTES]);
            }
            // These peers send all that is possible without the token: a valid hello, but no proof.
            let greet = |_| {
                let mut stream = peer.call(0);
                stream.write_all(&greeting(FAKE, 0)).unwrap();
                read_welcome(&mut stream);
                stream
            };
            let mut greeted: Vec<_> = (0..100).map(greet).collect();
            let closed = greeted[0].read(&mut [0]);
            assert!(!closed.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock));
            let shared = super::Shared::new(peer.engine());
            assert_eq!(sum(&shared), 7);
            shared.close(Engine::leave);
        },
    );
    assert!(sums.iter().all(|sum| matches!(sum, Ok(7))), "{sums:?}");
}

#[test]
fn unauthenticated_peers_disturb_no_call() {
    let over = AtomicBool::new(false);
    with_scripted_peer(
        |group| {
            let group = group.unwrap();
            for round in 0..200 {
                let mut got = [0];
                group.send(&[round], 1 - group.rank(), 0).unwrap();
                group.recv(&mut got, 1 - group.rank(), 0).unwrap();
                assert_eq!(got, [round]);
            }
            over.store(true, Ordering::SeqCst);
            // The third rank has left the group, and this call is the first to detect that.
            let error = group.barrier().unwrap_err();
            assert!(matches!(error, CommError::PeerLost { rank: FAKE, .. }), "{error}");
        },
        |peer| {
            let (addresses, mut engine) = (peer.addresses.clone(), peer.engine());
            let mut random = convoke_testkit::Random::new("unauthenticated_peers_disturb_no_call");
            while !over.load(Ordering::SeqCst) {
                let mut stream = TcpStream::connect(addresses[random.below(2)]).unwrap();
                let mut bytes = greeting(FAKE, random.below(2));
                for _ in 0..random.below(5) {
                    let at = random.below(bytes.len());
                    bytes[at] = random.next() as u8;
                }
                let _ = stream.write_all(&bytes[..random.below(bytes.len())]);
            }
            engine.leave();
        },
    );
}

/// Makes, as the third rank, the call in which ranks 0 and 1 wait.
fn sum(shared: &super::Shared) -> i32 {
    let call = Call::new(CallKind::AllReduce, Dtype::I32, Some(ReduceOp::Sum), 0, 1);
    let rounding = Rounding::of(&call);
    let topology = Topology::one_host(3);
    let algorithm = Algorithms::default().for_all_reduce(4, &topology, rounding);
    let input = Input { rank: FAKE, topology: &topology, rounding, element_bytes: 4 };
    let plan = Arc::new(crate::collectives::plan::all_reduce(algorithm, &input, 1));
    let kernel = crate::collectives::kernels::Kernel::of(Dtype::I32, ReduceOp::Sum, 3);
    let mut mine = [4_i32];
    let buffer = crate::buffer::BorrowedBuffer::default().with_mut(0, &mut mine[..]);
    shared
        .call(
            &mut Some(super::Operation::Collective {
                call,
                transport: super::Transport::Connections(plan),
                buffers: buffer.into(),
                kernel,
            }),
            LONG.into(),
        )
        .unwrap();
    mine[0]
}
