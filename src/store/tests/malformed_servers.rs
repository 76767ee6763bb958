//! Servers of another kind, and servers with wrong replies. Every call of the client returns an error
//! by its deadline.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::print_stderr)] // in a test a broken expectation ends it

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use convoke_store::{Store, StoreError, StoreServer, TcpStore};
use convoke_testkit::Thread;
use support::{blob, client, serve, soon, unserved_address, while_waiting, word};

/// Starts a server that runs `serve_connection` for each connection, until the test ends.
fn serve_with(serve_connection: impl Fn(TcpStream) + Send + Sync + Clone + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, serve_connection) = (stream.unwrap(), serve_connection.clone());
            thread::spawn(move || serve_connection(stream));
        }
    });
    address
}

/// Starts a server that performs the handshake and answers the first request, of any kind, with
/// `reply`.
fn answering(reply: Vec<u8>) -> SocketAddr {
    serve_with(move |mut stream| {
        let mut hello = [0; 10];
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(&hello[6..]).unwrap();
        let mut request = [0; 4096];
        let _ = stream.read(&mut request);
        // The client may have gone.
        let _ = stream.write_all(&reply);
        // The connection stays open until the client closes it.
        while stream.read(&mut request).is_ok_and(|count| count > 0) {}
    })
}

fn within(limit: Duration, work: impl FnOnce()) {
    let started = Instant::now();
    work();
    assert!(started.elapsed() < limit, "{:?}", started.elapsed());
}

fn deadline(milliseconds: u64) -> Instant {
    Instant::now() + Duration::from_millis(milliseconds)
}

#[test]
fn server_that_fails_the_handshake_is_unreachable_at_deadline() {
    let (_socket, unserved) = unserved_address();
    let servers: Vec<(&str, &str, SocketAddr)> = vec![
        ("nobody listens", "refused", unserved),
        (
            "accepts and says nothing",
            "does not answer as a store",
            serve_with(|mut stream| drop(stream.read(&mut [0; 1000]).and_then(|_| stream.read(&mut [0; 1])))),
        ),
        ("closes at once", "", serve_with(drop)),
        ("closes after the handshake", "", serve_with(|mut stream| drop(stream.read(&mut [0; 10])))),
        (
            "answers with another nonce",
            "not a store",
            serve_with(|mut stream| {
                let _ = stream.read(&mut [0; 10]);
                let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n");
            }),
        ),
        (
            "answers with half a nonce",
            "",
            serve_with(|mut stream| {
                let mut hello = [0; 10];
                let _ = stream.read(&mut hello);
                let _ = stream.write_all(&hello[6..8]);
            }),
        ),
    ];
    for (name, expected, address) in servers {
        println!("server: {name}");
        within(Duration::from_secs(5), || match TcpStore::connect(&address.to_string(), deadline(300)) {
            Err(StoreError::Unreachable { store, attempts, last, .. }) => {
                assert_eq!(store, address.to_string());
                assert!(attempts >= 1 && last.contains(expected), "{attempts}: {last}");
            }
            other => panic!("{other:?}"),
        });
    }
}

#[test]
fn unresolvable_names_are_unreachable() {
    within(Duration::from_secs(30), || {
        let error = TcpStore::connect("no-such-host.invalid:29500", deadline(200)).unwrap_err();
        assert!(matches!(error, StoreError::Unreachable { .. }), "{error}");
    });
    let error = TcpStore::connect("localhost", deadline(200)).unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error}");
}

#[test]
fn client_connects_to_a_server_that_starts_late() {
    let (socket, address) = unserved_address();
    let (sender, receiver) = channel();
    thread::scope(|scope| {
        let connecting = scope.spawn(move || {
            sender.send(Thread::current()).unwrap();
            TcpStore::connect(&address.to_string(), soon()).unwrap()
        });
        // The client sleeps only between two attempts, because this host refuses connections at once.
        receiver.recv().unwrap().wait_until_asleep();
        socket.listen(16).unwrap();
        let _server = StoreServer::serve(vec![socket.into()]).unwrap();
        connecting.join().unwrap().set(b"k", b"v", soon()).unwrap();
    });
}

type Call = fn(&TcpStore, Instant) -> Result<(), StoreError>;

const CALLS: [(&str, Call); 18] = [
    ("set", |store, deadline| store.set(b"k", b"v", deadline)),
    ("get", |store, deadline| store.get(b"k", deadline).map(drop)),
    ("try_get", |store, deadline| store.try_get(b"k", deadline).map(drop)),
    ("compare_set", |store, deadline| store.compare_set(b"k", b"", b"v", deadline).map(drop)),
    ("add", |store, deadline| store.add(b"k", 1, deadline).map(drop)),
    ("append", |store, deadline| store.append(b"k", b"v", deadline)),
    ("check", |store, deadline| store.check(&[b"k"], deadline).map(drop)),
    ("wait", |store, deadline| store.wait(&[b"k", b"l"], deadline)),
    ("multi_get", |store, deadline| store.multi_get(&[b"k"], deadline).map(drop)),
    ("multi_set", |store, deadline| store.multi_set(&[(b"k", b"v")], deadline)),
    ("delete", |store, deadline| store.delete(b"k", deadline).map(drop)),
    ("num_keys", |store, deadline| store.num_keys(deadline).map(drop)),
    ("list_keys", |store, deadline| store.list_keys(deadline).map(drop)),
    ("queue_push", |store, deadline| store.queue_push(b"k", b"v", deadline)),
    ("queue_pop", |store, deadline| store.queue_pop(b"k", deadline).map(drop)),
    ("queue_len", |store, deadline| store.queue_len(b"k", deadline).map(drop)),
    ("barrier", |store, deadline| store.barrier(b"k", 2, deadline)),
    ("wait_for_workers", |store, deadline| store.wait_for_workers(2, deadline)),
];

#[test]
fn every_call_to_a_mute_server_times_out() {
    let address = answering(vec![]);
    for (name, call) in CALLS {
        println!("call: {name}");
        let store = TcpStore::connect(&address.to_string(), soon()).unwrap();
        within(Duration::from_secs(3), || {
            let result = call(&store, deadline(30));
            assert!(matches!(result, Err(StoreError::Timeout { .. })), "{result:?}");
        });
    }
}

#[test]
fn closed_connection_fails_every_call_and_reconnection_finds_nobody() {
    thread::scope(|scope| {
        for (index, (name, call)) in CALLS.iter().enumerate() {
            scope.spawn(move || {
                // Each case has its own address. At 127.0.0.1 another program may get the port of the server
                // that ended.
                let address = format!("127.66.{}.{}:0", std::process::id() % 250, index + 1);
                let server = StoreServer::bind(&[address.parse().unwrap()]).unwrap();
                let store = TcpStore::connect(&server.addresses()[0].to_string(), soon()).unwrap();
                drop(server);
                within(Duration::from_secs(5), || {
                    let result = call(&store, soon());
                    assert!(matches!(result, Err(StoreError::Lost { .. })), "{name}: {result:?}");
                    let result = call(&store, soon());
                    assert!(matches!(result, Err(StoreError::Unreachable { .. })), "{name}: {result:?}");
                });
            });
        }
    });
}

#[test]
fn waiting_client_detects_the_end_of_its_server() {
    let server = serve();
    let store = TcpStore::connect(&server.addresses()[0].to_string(), soon()).unwrap();
    let other = client(&server);
    let deadline = soon();
    let result = while_waiting(&other, || store.get(b"never", deadline), || server.shutdown());
    assert!(Instant::now() < deadline, "it was not told");
    assert!(matches!(result, Err(StoreError::Lost { operation: "get", .. })), "{result:?}");
}

#[test]
fn impossible_replies_are_protocol_errors() {
    let huge = word(u64::MAX);
    let cases: Vec<(&str, &str, Vec<u8>)> = vec![
        ("get", "a wait ends with 7", vec![7]),
        ("get", "a value of 2^64-1 bytes", [&[0][..], &huge].concat()),
        ("get", "a value of 1 TiB", [&[0][..], &word(1 << 40)].concat()),
        ("compare_set", "a value of 2^64-1 bytes", huge.clone()),
        ("multi_get", "a value of 2^64-1 bytes", [&[0][..], &huge].concat()),
        ("list_keys", "a negative count", huge.clone()),
        ("list_keys", "2^62 keys", word(1 << 62)),
        ("list_keys", "a key of 2^64-1 bytes", [word(1), huge.clone()].concat()),
        ("queue_pop", "an item of 2^64-1 bytes", [&[0][..], &word(1), &huge].concat()),
        ("queue_pop", "a negative number of items", [&[0][..], &huge].concat()),
        ("queue_len", "a negative number of items", huge.clone()),
        ("num_keys", "a negative number of keys", huge.clone()),
        ("delete", "a negative number of keys", huge.clone()),
        ("check", "neither yes nor no", vec![9]),
        ("try_get", "neither yes nor no", vec![255]),
        ("set", "another nonce", vec![0; 4]),
        ("barrier", "a barrier ends with 1", vec![1]),
    ];
    for (call_name, what, reply) in cases {
        println!("{call_name}: {what}");
        let call = CALLS.iter().find(|(name, _)| *name == call_name).unwrap().1;
        let address = answering(reply);
        let store = TcpStore::connect(&address.to_string(), soon()).unwrap();
        within(Duration::from_secs(5), || match call(&store, deadline(2000)) {
            Err(StoreError::Protocol { store, what }) => {
                assert_eq!(store, address.to_string());
                assert!(what.starts_with(if call_name == "try_get" { "get" } else { call_name }), "{what}");
            }
            other => panic!("{other:?}"),
        });
    }
}

/// Starts a server that confirms a last will and answers the wait for its key with `reply`.
fn confirming_last_wills(reply: Vec<u8>) -> SocketAddr {
    serve_with(move |mut stream| {
        let (mut handshake, mut will_and_ping, mut wait) = ([0; 10], [0; 25], [0; 4096]);
        stream.read_exact(&mut handshake).unwrap();
        stream.write_all(&handshake[6..]).unwrap();
        // A last will of one byte under "/k" takes 20 bytes. The nonce of the PING is at the end.
        if stream.read_exact(&mut will_and_ping).is_ok() {
            stream.write_all(&will_and_ping[21..]).unwrap();
            let _ = stream.read(&mut wait);
            stream.write_all(&reply).unwrap();
        }
        while stream.read(&mut wait).is_ok_and(|count| count > 0) {}
    })
}

#[test]
fn wrong_reply_to_a_watch_is_a_protocol_error() {
    let store = TcpStore::connect(&confirming_last_wills(vec![7]).to_string(), soon()).unwrap();
    let (_will, mut watch) = store.set_last_will(b"k", b"v", soon()).unwrap();
    let error = watch.wait(soon()).unwrap_err();
    assert!(error.to_string().ends_with("watch: it ended a wait with 7"), "{error}");
}

#[test]
fn unconfirmed_last_will_times_out_with_the_elapsed_time() {
    let store = TcpStore::connect(&answering(vec![]).to_string(), soon()).unwrap();
    match store.set_last_will(b"k", b"v", deadline(100)) {
        Err(StoreError::Timeout { after, .. }) => assert!(after >= Duration::from_millis(90), "{after:?}"),
        other => panic!("{other:?}"),
    }
}

/// Runs every call against replies of random bytes. Each call returns by its deadline.
///
/// The bytes are mostly small numbers, so that lengths and counts are often plausible.
#[test]
fn random_replies_never_cause_a_panic() {
    let seed = std::env::var("CONVOKE_SEED").map_or_else(
        |_| std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
        |seed| seed.parse().unwrap(),
    );
    println!("replay with CONVOKE_SEED={seed}");
    let mut state = seed;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for round in 0..20 {
        for (name, call) in &CALLS {
            let length = random(60);
            let byte = |random: &mut dyn FnMut(u64) -> u64| match random(8) {
                0 => random(256) as u8,
                1 | 2 => random(4) as u8,
                _ => 0,
            };
            let reply: Vec<u8> = (0..length).map(|_| byte(&mut random)).collect();
            let description = format!("{name}, round {round}: {reply:?}");
            let store = TcpStore::connect(&answering(reply).to_string(), soon()).unwrap();
            let started = Instant::now();
            let _ = call(&store, deadline(10));
            // The time includes the cancellation of a wait that timed out.
            assert!(started.elapsed() < Duration::from_secs(10), "{description}");
        }
    }
}

#[test]
fn unsolicited_bytes_do_not_affect_the_next_call() {
    let extra = [&[0][..], &blob(b"v"), b"surplus"].concat();
    let address = answering(extra.clone());
    let store = TcpStore::connect(&address.to_string(), soon()).unwrap();
    // The reply has the end of the wait, the value and surplus bytes. The client may take the surplus
    // for another reply, but no call may hang.
    for _ in 0..3 {
        let _ = store.get(b"k", deadline(200));
    }
}
