//! Clients that break the protocol or overload the server. Only their own connections may be closed.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::print_stderr)] // in a test a broken expectation ends it

mod support;

use std::io::{ErrorKind, Write};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use convoke_store::Store;
use convoke_testkit::assert_one_passed;
use support::{
    ADD, APPEND, BARRIER, CANCEL_WAIT, CHECK, COMPARE_SET, DELETE, GET, HELLO, HELLO_REPLY, MULTI_GET,
    MULTI_SET, PING, QUEUE_PUSH, SET, WAIT, another_process, blob, client, connected, counted, is_served,
    raw, read, read_to_close, request, serve, server_thread, status_field, stays_silent, wait_until_read,
    word,
};

/// The server's reaction to the bytes of a connection.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Reaction {
    Closes,
    WaitsForMore,
}
use Reaction::{Closes, WaitsForMore};

#[test]
fn garbage_closes_only_its_own_connection() {
    let (huge, minus) = (word(u64::MAX), word(i64::MIN.cast_unsigned()));
    let long_key = vec![b'k'; 8193];
    let hello_and = |bytes: &[u8]| [&HELLO[..], bytes].concat();
    let with = |parts: &[&[u8]]| hello_and(&parts.concat());
    let cases: Vec<(&str, Vec<u8>, Reaction)> = vec![
        // The handshake.
        ("nothing", vec![], WaitsForMore),
        ("half a magic", HELLO[..3].to_vec(), WaitsForMore),
        ("a wrong magic", vec![0, 0xce, 0xf7, 0x85, 0x3d], Closes),
        ("a magic of zeros", vec![0; 5], Closes),
        ("a magic in the other byte order", vec![0, 0x3c, 0x85, 0xf7, 0xce], Closes),
        ("PING before VALIDATE", vec![PING, 0x44, 0x44, 0, 0], Closes),
        ("SET before VALIDATE", request(SET, &[b"/k", b"v"]), Closes),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: store\r\n\r\n".to_vec(), Closes),
        ("a TLS hello", vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3], Closes),
        ("half a PING", HELLO[..7].to_vec(), WaitsForMore),
        ("VALIDATE twice", with(&[&HELLO[..5]]), Closes),
        // Request types.
        ("type 19", hello_and(&[19]), Closes),
        ("type 0x41, set aside", hello_and(&[0x41]), Closes),
        ("type 255", hello_and(&[255]), Closes),
        ("text", hello_and(b"hello store\n"), Closes),
        // Lengths and counts.
        ("a key of 8193 bytes", hello_and(&request(GET, &[&long_key])), Closes),
        ("a key of 2^64-1 bytes", with(&[&[GET], &huge]), Closes),
        ("a key of 2^63 bytes", with(&[&[DELETE], &minus]), Closes),
        ("a value of 8 MiB + 1", with(&[&[SET], &blob(b"/k"), &word((8 << 20) + 1)]), Closes),
        ("a value of 2^64-1 bytes", with(&[&[APPEND], &blob(b"/k"), &huge]), Closes),
        ("an expected value of 2^64-1 bytes", with(&[&[COMPARE_SET], &blob(b"/k"), &huge]), Closes),
        ("a desired value of 2^64-1 bytes", with(&[&[COMPARE_SET], &blob(b"/k"), &blob(b""), &huge]), Closes),
        ("an item of 2^64-1 bytes", with(&[&[QUEUE_PUSH], &blob(b"/k"), &huge]), Closes),
        ("131,073 keys in CHECK", with(&[&[CHECK], &word(131_073)]), Closes),
        ("131,073 keys in WAIT", with(&[&[WAIT], &word(131_073)]), Closes),
        ("2^64-1 keys in MULTI_GET", with(&[&[MULTI_GET], &huge]), Closes),
        ("2^64-1 pairs in MULTI_SET", with(&[&[MULTI_SET], &huge]), Closes),
        ("2^63 pairs in MULTI_SET", with(&[&[MULTI_SET], &minus]), Closes),
        ("a good key and a bad one", with(&[&[WAIT], &word(2), &blob(b"/k"), &huge]), Closes),
        ("a good pair and a bad one", with(&[&counted(MULTI_SET, 2, &[b"/half", b"v"]), &huge]), Closes),
        // Requests that cannot be carried out.
        ("ADD on text", with(&[&request(SET, &[b"/t", b"abc"]), &request(ADD, &[b"/t"]), &word(1)]), Closes),
        ("ADD on nothing", with(&[&request(SET, &[b"/t", b""]), &request(ADD, &[b"/t"]), &word(1)]), Closes),
        (
            "BARRIER on text",
            with(&[&request(SET, &[b"/t", b"abc"]), &request(BARRIER, &[b"/t"]), &word(1)]),
            Closes,
        ),
        ("1025 waits at once", hello_and(&counted(WAIT, 1, &[b"/never"]).repeat(1025)), Closes),
        // Requests that end early.
        ("a type alone", hello_and(&[SET]), WaitsForMore),
        ("half a length", hello_and(&[SET, 2, 0, 0]), WaitsForMore),
        ("a key without its end", with(&[&[GET], &word(8192), &[b'k'; 8000]]), WaitsForMore),
        ("a key without a value", hello_and(&request(SET, &[b"/k"])), WaitsForMore),
        (
            "a value without its end",
            with(&[&request(SET, &[b"/k"]), &word(8 << 20), &[0; 1000]]),
            WaitsForMore,
        ),
        ("half a number", with(&[&request(ADD, &[b"/n"]), &[1, 0, 0]]), WaitsForMore),
        ("131,072 keys announced, one sent", hello_and(&counted(WAIT, 131_072, &[b"/k"])), WaitsForMore),
        ("half a MULTI_SET", hello_and(&counted(MULTI_SET, 2, &[b"/m1", b"1", b"/m2"])), WaitsForMore),
    ];
    assert!(cases.len() >= 40, "{}", cases.len());
    let server = serve();
    let other = client(&server);
    let waiting = client(&server);
    thread::scope(|scope| {
        let waiter =
            scope.spawn(|| waiting.wait(&[b"all cases done"], Instant::now() + Duration::from_secs(60)));
        for (name, bytes, reaction) in &cases {
            println!("case: {name}");
            let mut stream = raw(server.addresses()[0]);
            let is_handshake = bytes.starts_with(&HELLO);
            // The server may close the connection before all bytes are sent.
            let sent = stream.write_all(bytes);
            assert!(sent.is_ok() || *reaction == Closes, "{sent:?}");
            match reaction {
                Closes => drop(read_to_close(&mut stream)),
                WaitsForMore => {
                    if is_handshake {
                        assert_eq!(read(&mut stream, 4), HELLO_REPLY);
                    }
                    stays_silent(&mut stream, &other);
                    is_served(&other);
                    // The client disappears in the middle of a request.
                    drop(stream);
                }
            }
            is_served(&other);
        }
        other.set(b"all cases done", b"", support::soon()).unwrap();
        waiter.join().unwrap().unwrap();
    });
    assert!(server.take_warning().is_none());
}

#[test]
fn replies_due_before_garbage_are_still_sent() {
    let server = serve();
    let mut stream = raw(server.addresses()[0]);
    let bytes = [&HELLO[..], &request(SET, &[b"/k", b"v1"]), &request(GET, &[b"/k"]), &[0xff]].concat();
    stream.write_all(&bytes).unwrap();
    assert_eq!(read_to_close(&mut stream), [&HELLO_REPLY[..], &blob(b"v1")].concat());
}

#[test]
fn requests_sent_byte_by_byte_are_executed() {
    let server = serve();
    let other = client(&server);
    let mut stream = raw(server.addresses()[0]);
    let key = vec![b'k'; 300];
    let bytes = [&HELLO[..], &request(SET, &[&key, b"slow"]), &request(GET, &[&key])].concat();
    for (count, byte) in bytes.iter().enumerate() {
        stream.write_all(&[*byte]).unwrap();
        if count % 100 == 0 {
            is_served(&other);
        }
    }
    assert_eq!(read(&mut stream, 4), HELLO_REPLY);
    assert_eq!(read(&mut stream, 12), blob(b"slow"));
}

#[test]
fn floods_of_garbage_from_many_connections_disturb_nobody() {
    let server = serve();
    let other = client(&server);
    thread::scope(|scope| {
        for seed in 1..=8_u64 {
            let address = server.addresses()[0];
            scope.spawn(move || {
                let mut state = seed;
                for round in 0..20 {
                    let mut stream = if round % 2 == 0 { raw(address) } else { connected(address) };
                    let garbage: Vec<u8> = (0..100_000)
                        .map(|_| {
                            state = state
                                .wrapping_mul(6_364_136_223_846_793_005)
                                .wrapping_add(1_442_695_040_888_963_407);
                            (state >> 56) as u8 | 0x20
                        })
                        .collect();
                    // The loop ends when the server closes the connection.
                    let _ = stream.write_all(&garbage);
                    read_to_close(&mut stream);
                }
            });
        }
        for _ in 0..50 {
            is_served(&other);
        }
    });
    is_served(&other);
}

#[test]
fn client_that_does_not_read_uses_little_memory_and_recovers() {
    let process = another_process("subprocess_has_a_client_that_does_not_read", Stdio::null());
    assert_one_passed(&process.wait_with_output().unwrap());
}

#[test]
#[ignore = "run by client_that_does_not_read_uses_little_memory_and_recovers, whose memory it measures"]
fn subprocess_has_a_client_that_does_not_read() {
    const REQUESTS: usize = 300;
    let server = serve();
    let (other, thread) = (client(&server), server_thread());
    let value = vec![7; 8 << 20];
    other.set(b"large", &value, support::soon()).unwrap();
    let before = status_field(std::process::id(), "VmRSS");
    let mut stream = connected(server.addresses()[0]);
    // The replies would take 2.4 GiB.
    stream.write_all(&request(GET, &[b"/large"]).repeat(REQUESTS)).unwrap();
    for _ in 0..20 {
        is_served(&other);
        // The server sleeps, so no more replies than this go into its memory.
        thread.wait_until_asleep();
    }
    let grown = status_field(std::process::id(), "VmRSS").saturating_sub(before);
    assert!(grown < 100 << 10, "{grown} KiB");
    for _ in 0..20 {
        assert_eq!(read(&mut stream, 8), word(8 << 20));
        assert!(read(&mut stream, 8 << 20) == value);
    }
    is_served(&other);
}

#[test]
fn requests_of_a_client_that_never_reads_are_paused() {
    let server = serve();
    let other = client(&server);
    other.set(b"k", &[1; 1000], support::soon()).unwrap();
    let mut stream = connected(server.addresses()[0]);
    stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let flood = request(GET, &[b"/k"]).repeat(1000);
    let mut sent = 0_usize;
    let stuck = loop {
        match stream.write(&flood) {
            Ok(count) => sent += count,
            Err(error) => break error,
        }
        assert!(sent < 1 << 30, "a gibibyte of requests was taken");
    };
    assert!(matches!(stuck.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{stuck}");
    is_served(&other);
}

#[test]
fn waits_and_items_of_lost_clients_are_released() {
    let server = serve();
    let other = client(&server);
    // The server wakes the first client, which has gone; the item must reach the second client.
    let mut gone = connected(server.addresses()[0]);
    gone.write_all(&counted(WAIT, 1, &[b"/q"])).unwrap();
    stays_silent(&mut gone, &other);
    let mut next = connected(server.addresses()[0]);
    next.write_all(&counted(WAIT, 1, &[b"/q"])).unwrap();
    stays_silent(&mut next, &other);
    other.queue_push(b"q", b"item", support::soon()).unwrap();
    assert_eq!(read(&mut gone, 1), [0]);
    drop(gone);
    assert_eq!(read(&mut next, 1), [0]);
}

#[test]
fn cancel_that_crosses_a_wake_up_is_still_answered() {
    let server = serve();
    let other = client(&server);
    let mut stream = connected(server.addresses()[0]);
    stream.write_all(&[CANCEL_WAIT]).unwrap();
    assert_eq!(read(&mut stream, 1), [1]);
    stream.write_all(&counted(WAIT, 1, &[b"/late"])).unwrap();
    stays_silent(&mut stream, &other);
    other.set(b"late", b"", support::soon()).unwrap();
    stream.write_all(&[CANCEL_WAIT]).unwrap();
    assert_eq!(read(&mut stream, 2), [0, 1]);
}

#[test]
fn half_closed_client_still_gets_its_replies() {
    let server = serve();
    let other = client(&server);
    other.set(b"large", &vec![9; 8 << 20], support::soon()).unwrap();
    let mut stream = connected(server.addresses()[0]);
    stream.write_all(&request(GET, &[b"/large"])).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    // The server reads the end of the stream before the client reads the replies.
    wait_until_read(&other);
    assert_eq!(read_to_close(&mut stream).len(), 8 + (8 << 20));
}
