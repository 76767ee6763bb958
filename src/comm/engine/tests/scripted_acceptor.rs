//! A scripted process accepts the connections of a rank: the process that answers at a published address may
//! be any process.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use convoke_store::{MemoryStore, Store};

use super::{LONG, frame, generation, token, with};
use crate::api::group::Group;
use crate::bootstrap::options::GroupOptions;
use crate::collectives::plan::Algorithms;
use crate::error::CommError;
use crate::transport::frame::{Frame, HEADER_BYTES, Kind, VERSION};
use crate::transport::links::hello::{HELLO_BYTES, SUITE_PLAIN, WELCOME_BYTES, Welcome};

/// Runs rank 1 with a scripted rank 0 that answers each hello with `answer` and, if `stays` is set, keeps the
/// connection open. Returns the error of rank 1.
fn connect_error(answer: &[u8], stays: bool) -> CommError {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = listener.local_addr().unwrap();
    let soon = Instant::now() + LONG;
    let prefix = format!("convoke/default/{}", generation());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let caller = Arc::clone(&store);
        let caller = scope.spawn(move || {
            let options = GroupOptions::default().timeout(LONG).init_timeout(Duration::from_millis(300));
            Group::new(caller, 1, 2, options.generation(generation()).token(token())).unwrap_err()
        });
        let theirs = store.get(format!("{prefix}/rank/1").as_bytes(), soon).unwrap();
        let ours = format!(
            "{{\"version\":{VERSION},\"rank\":0,\"size\":2,\"address\":\"{address}\",\"host\":\"\",\"pid\":1,\"tuning\":\"{}\",\
             \"token\":true,\"memory\":true}}",
            Algorithms::default()
        );
        let table = serde_json::to_vec(&[ours, String::from_utf8(theirs).unwrap()]).unwrap();
        store.set(format!("{prefix}/table").as_bytes(), &table, soon).unwrap();
        let over = &over;
        scope.spawn(move || {
            let mut open = Vec::new();
            while let Ok((mut stream, _)) = listener.accept() {
                if over.load(Ordering::SeqCst) {
                    return;
                }
                let _ = stream.read_exact(&mut [0; HEADER_BYTES + HELLO_BYTES]);
                let _ = stream.write_all(answer);
                open.extend(stays.then_some(stream));
            }
        });
        let error = caller.join().unwrap();
        over.store(true, Ordering::SeqCst);
        drop(std::net::TcpStream::connect(address));
        error
    })
}

#[test]
fn acceptor_with_a_wrong_answer_is_named() {
    let welcome = |suite: u8| Welcome { suite, capabilities: 0, nonce: [7; 32], proof: [8; 32] }.encode();
    let good = Frame { len: WELCOME_BYTES as u64, ..frame(Kind::Welcome, 0) };
    let mut version = with(good, &welcome(SUITE_PLAIN));
    version[4] = 9;
    // (case, answer, whether the connection stays open, part of the error)
    let cases: Vec<(&str, Vec<u8>, bool, &str)> = vec![
        ("nothing", Vec::new(), true, "no connection with rank(s) 0"),
        ("the end", Vec::new(), false, "connection closed before it answered"),
        ("a web server", b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), true, "not a convoke frame"),
        ("half a header", with(good, &[])[..HEADER_BYTES / 2].to_vec(), false, "closed before it answered"),
        ("half a welcome", with(good, &[0; 10]), false, "closed before it answered"),
        ("another version", version, true, "version 9"),
        ("a huge welcome", with(Frame { len: 4000, ..good }, &[0; 100]), true, "claims 4000 bytes"),
        ("a refusal", with(frame(Kind::Refuse, 4), b"away"), true, "it refused: away"),
        ("a refusal in no words", with(frame(Kind::Refuse, 3), &[0xFF; 3]), true, "it refused"),
    ];
    // Each case waits until its timeout expires.
    std::thread::scope(|scope| {
        for (what, answer, stays, part) in cases {
            scope.spawn(move || {
                let error = connect_error(&answer, stays);
                let text = error.to_string();
                assert!(
                    matches!(&error, CommError::Bootstrap { ranks, .. } if *ranks == [0]),
                    "{what}: {text}"
                );
                assert!(text.contains(part), "{what}: {text}");
            });
        }
    });
    for (what, answer, part) in [
        ("a wrong proof", with(good, &welcome(SUITE_PLAIN)), "another token"),
        ("an unknown suite", with(good, &welcome(5)), "suite 5"),
        ("a short welcome", with(frame(Kind::Welcome, 3), &[0; 3]), "a welcome has 72 bytes"),
        ("a hello", with(frame(Kind::Hello, 48), &[0; 48]), "answered a hello with a Hello frame"),
        ("data", with(frame(Kind::Data, 8), &[0; 8]), "answered a hello with a Data frame"),
    ] {
        let error = connect_error(&answer, true);
        let text = error.to_string();
        assert!(
            matches!(&error, CommError::Unauthorized { from, .. } if from.starts_with("rank 0 at ")),
            "{what}: {text}"
        );
        assert!(text.contains(part), "{what}: {text}");
    }
}
