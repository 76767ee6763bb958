//! The interface of `StoreServer`, and servers under load.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::print_stderr)] // in a test a broken expectation ends it

mod support;

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use convoke_store::{ServeError, Store, StoreError, StoreServer, TcpStore, raise_descriptor_limit};
use convoke_testkit::{assert_one_passed, skip, wait_until};
use nix::sys::resource::{Resource, setrlimit};
use support::{
    ADD, GET, HELLO, SET, WAIT, another_process, blob, client, connected, counted, is_served, raw, read,
    read_to_close, request, serve, server_thread, soon, status_field, while_waiting, word,
};

fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
fn several_addresses_share_keys_and_a_port() {
    let asked = addresses(&["127.0.0.1:0", "127.0.0.2:0", "127.0.0.3:0"]);
    let server = StoreServer::bind(&asked).unwrap();
    assert_ne!(server.port(), 0);
    for (address, asked) in server.addresses().iter().zip(&asked) {
        assert_eq!((address.ip(), address.port()), (asked.ip(), server.port()));
        let store = TcpStore::connect(&address.to_string(), soon()).unwrap();
        store.add(b"n", 1, soon()).unwrap();
    }
    assert_eq!(server.store().get(b"n", soon()).unwrap(), b"3");
}

#[test]
fn wildcard_address_includes_ipv4() {
    for asked in [&["[::]:0"][..], &["0.0.0.0:0"], &["[::]:0", "0.0.0.0:0"]] {
        let server = StoreServer::bind(&addresses(asked)).unwrap();
        TcpStore::connect(&format!("127.0.0.1:{}", server.port()), soon()).unwrap();
        TcpStore::connect(&format!("localhost:{}", server.port()), soon()).unwrap();
    }
}

#[test]
fn address_in_use_is_named() {
    let first = serve();
    let error =
        StoreServer::bind(&addresses(&["127.0.0.2:0", &first.addresses()[0].to_string()])).unwrap_err();
    assert!(matches!(error, ServeError::InUse { address } if address == first.addresses()[0]), "{error}");
    assert!(error.to_string().contains(&first.addresses()[0].to_string()), "{error}");
    let error = StoreServer::bind(&addresses(&["192.0.2.1:0"])).unwrap_err();
    assert!(matches!(error, ServeError::Listen { .. }) && error.to_string().contains("192.0.2.1"), "{error}");
    assert!(matches!(StoreServer::bind(&[]), Err(ServeError::NoAddress)));
}

#[test]
fn existing_listening_socket_can_be_passed_to_the_server() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = StoreServer::serve(vec![listener]).unwrap();
    assert_eq!(server.addresses(), [address]);
    is_served(&client(&server));
}

#[test]
fn port_is_free_again_after_shutdown() {
    let server = serve();
    let address = server.addresses()[0];
    let mut idle = connected(address);
    server.shutdown();
    read_to_close(&mut idle);
    let again = StoreServer::bind(&[address]).unwrap();
    assert_eq!(client(&again).num_keys(soon()).unwrap(), 0, "nothing survives");
}

#[test]
fn server_handle_fails_after_shutdown_and_wakes_waiters() {
    let server = serve();
    let (view, other) = (server.store(), client(&server));
    let deadline = soon();
    let result = while_waiting(&other, || view.get(b"never", deadline), || drop(server));
    assert!(Instant::now() < deadline, "it was not woken");
    assert!(matches!(result, Err(StoreError::Lost { .. })), "{result:?}");
    assert!(matches!(view.set(b"k", b"", soon()), Err(StoreError::Lost { .. })));
}

#[test]
fn due_replies_are_sent_before_shutdown() {
    let server = serve();
    let mut waiting = connected(server.addresses()[0]);
    waiting.write_all(&counted(WAIT, 1, &[b"/k"])).unwrap();
    support::stays_silent(&mut waiting, &client(&server));
    server.store().set(b"k", b"", soon()).unwrap();
    server.shutdown();
    assert_eq!(read_to_close(&mut waiting), [0]);
}

#[test]
fn shutdown_is_quick_despite_a_client_that_does_not_read() {
    let server = serve();
    let other = client(&server);
    other.set(b"large", &vec![1; 8 << 20], soon()).unwrap();
    let mut stuck = connected(server.addresses()[0]);
    stuck.write_all(&request(GET, &[b"/large"]).repeat(4)).unwrap();
    is_served(&other);
    let started = Instant::now();
    server.shutdown();
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}

#[test]
fn retain_over_tcp_keeps_keys_with_the_prefix() {
    let server = serve();
    let store = client(&server);
    store.announce_worker(soon()).unwrap();
    store.multi_set(&[(b"torchelastic/a", b"1"), (b"old", b"2")], soon()).unwrap();
    store.queue_push(b"old-queue", b"x", soon()).unwrap();
    assert_eq!(server.retain(&[b"/torchelastic/"]), 3);
    assert_eq!(store.list_keys(soon()).unwrap(), [b"torchelastic/a"]);
    assert_eq!(store.num_keys(soon()).unwrap(), 1);
    assert_eq!(store.queue_len(b"old-queue", soon()).unwrap(), 0);
}

#[test]
fn workers_are_counted_like_in_torch() {
    let server = serve();
    let (one, two) = (client(&server), client(&server));
    assert_eq!(one.announce_worker(soon()).unwrap(), 1);
    let error = one.wait_for_workers(2, Instant::now() + Duration::from_secs(1)).unwrap_err();
    assert!(error.to_string().contains("1 of 2 workers came"), "{error}");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| one.wait_for_workers(2, soon()));
        assert_eq!(two.announce_worker(soon()).unwrap(), 2);
        waiting.join().unwrap().unwrap();
    });
    // Torch's key of the count has no leading slash, and users do not see it.
    let mut torch = connected(server.addresses()[0]);
    torch.write_all(&request(GET, &[b"init/"])).unwrap();
    assert_eq!(read(&mut torch, 9), blob(b"2"));
    assert!(one.list_keys(soon()).unwrap().is_empty());
    torch.write_all(&[request(SET, &[b"init/", b"two"]), request(GET, &[b"init/"])].concat()).unwrap();
    assert_eq!(read(&mut torch, 11), blob(b"two"));
    let error = one.wait_for_workers(2, soon()).unwrap_err();
    assert_eq!(error.to_string(), "store: the value of init/ is not a number");
}

/// Serves one client of the store at `to`: passes on all that it sends, and `replies` reads of what the store
/// sends back; keeps the rest.
fn proxy_that_stalls(to: SocketAddr, replies: Arc<AtomicUsize>) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut store = TcpStream::connect(to).unwrap();
        let (mut from_client, mut to_store) = (client.try_clone().unwrap(), store.try_clone().unwrap());
        thread::spawn(move || std::io::copy(&mut from_client, &mut to_store));
        let mut buffer = [0; 4096];
        while let Ok(bytes @ 1..) = store.read(&mut buffer) {
            if replies.load(Ordering::SeqCst) > 0 {
                replies.fetch_sub(1, Ordering::SeqCst);
                client.write_all(&buffer[..bytes]).unwrap();
            }
        }
    });
    address
}

#[test]
fn count_of_workers_is_reported_although_the_last_question_has_no_answer() {
    let server = serve();
    let replies = Arc::new(AtomicUsize::new(usize::MAX));
    let address = proxy_that_stalls(server.addresses()[0], Arc::clone(&replies)).to_string();
    let store = TcpStore::connect(&address, soon()).unwrap();
    assert_eq!(store.announce_worker(soon()).unwrap(), 1);
    // The first question is two requests: whether there is a count, and the count.
    replies.store(2, Ordering::SeqCst);
    let error = store.wait_for_workers(2, Instant::now() + Duration::from_secs(1)).unwrap_err();
    assert!(error.to_string().contains("1 of 2 workers came"), "{error}");
}

#[test]
fn more_threads_than_connections_share_them() {
    let server = serve();
    let store = client(&server);
    thread::scope(|scope| {
        for _ in 0..60 {
            scope.spawn(|| {
                for _ in 0..20 {
                    store.add(b"n", 1, soon()).unwrap();
                }
            });
        }
    });
    assert_eq!(server.store().add(b"n", 0, soon()).unwrap(), 1200);
}

#[test]
fn server_without_free_descriptors_serves_existing_connections() {
    let process = another_process("subprocess_exhausts_descriptors", Stdio::null());
    assert_one_passed(&process.wait_with_output().unwrap());
}

#[test]
#[ignore = "run by server_without_free_descriptors_serves_existing_connections, in a process of its own"]
fn subprocess_exhausts_descriptors() {
    setrlimit(Resource::RLIMIT_NOFILE, 64, 64).unwrap();
    let server = serve();
    let other = client(&server);
    let (address, thread) = (server.addresses()[0], server_thread());
    // One descriptor is left, which the client's end of the connection takes. The kernel completes the
    // connection, but the server cannot accept it.
    let mut files = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        files.push(file);
    }
    files.pop();
    let mut late = raw(address);
    late.write_all(&HELLO).unwrap();
    for _ in 0..3 {
        let warning = wait_until("it to say that it cannot accept", || server.take_warning());
        assert!(warning.contains("cannot accept"), "{warning}");
        is_served(&other);
        // A server that tried to accept again and again would never sleep.
        thread.wait_until_asleep();
    }
    files.clear();
    assert_eq!(read(&mut late, 4), HELLO[6..], "served as soon as there are descriptors again");
}

const CLIENTS: usize = 10_000;

#[test]
fn ten_thousand_clients_wait_for_one_key() {
    let (_, hard) = raise_descriptor_limit().unwrap();
    let clients = CLIENTS.min(usize::try_from(hard).unwrap_or(usize::MAX).saturating_sub(200));
    if clients < CLIENTS {
        skip(format_args!("{clients} clients instead of {CLIENTS}: the hard limit of descriptors is {hard}"));
    }
    let mut server = another_process("subprocess_runs_a_server", Stdio::piped());
    let (address, _output) = announced_address(&mut server);
    let other = TcpStore::connect(&address.to_string(), soon()).unwrap();
    let before = status_field(server.id(), "VmRSS");
    let mut streams: Vec<_> = (0..clients).map(|_| connected(address)).collect();
    let grown = status_field(server.id(), "VmRSS").saturating_sub(before);
    assert!(grown * 1024 < 1000 * clients as u64, "{grown} KiB for {clients} idle clients");
    let wait = counted(WAIT, 1, &[b"/release"]);
    streams.iter_mut().for_each(|stream| stream.write_all(&wait).unwrap());
    is_served(&other);
    let started = Instant::now();
    other.set(b"release", b"", soon()).unwrap();
    for stream in &mut streams {
        assert_eq!(read(stream, 1), [0]);
    }
    println!("{clients} clients released in {:?}", started.elapsed());
    // All clients send a request at once, and each gets its own answer.
    let add = [request(ADD, &[b"/n"]), word(1)].concat();
    streams.iter_mut().for_each(|stream| stream.write_all(&add).unwrap());
    let sums: u64 =
        streams.iter_mut().map(|stream| u64::from_le_bytes(read(stream, 8).try_into().unwrap())).sum();
    let clients = clients as u64;
    assert_eq!(sums, clients * (clients + 1) / 2);
    drop(streams);
    is_served(&other);
    drop(server.stdin.take());
    assert!(server.wait().unwrap().success());
}

/// Returns the address that the other process prints, and its output, which must stay open.
fn announced_address(server: &mut Child) -> (SocketAddr, Lines<BufReader<ChildStdout>>) {
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    loop {
        if let Some(address) = lines.next().unwrap().unwrap().strip_prefix("listening on ") {
            return (address.parse().unwrap(), lines);
        }
    }
}

#[test]
#[ignore = "run by ten_thousand_clients_wait_for_one_key, in a process of its own"]
fn subprocess_runs_a_server() {
    let server = serve();
    println!("\nlistening on {}", server.addresses()[0]);
    // The server runs until the parent closes the pipe or dies.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
    drop(server);
}
