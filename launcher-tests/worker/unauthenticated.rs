//! A network client that does not belong to the job.
//!
//! ```text
//! test-worker unauthenticated flood ADDRESS COUNT         opens COUNT connections, sends bytes, waits 3 s
//! test-worker unauthenticated record LISTEN ADDRESS FILE  forwards connections, records the first client
//! test-worker unauthenticated replay ADDRESS FILE         sends the record, whole and cut; prints sizes
//! ```

#![allow(clippy::unwrap_used, clippy::print_stdout)] // test code

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

const HOLD_TIME: Duration = Duration::from_secs(3);

pub(super) fn run(arguments: &[&str]) -> super::Outcome {
    match *arguments {
        ["flood", address, count] => flood(address, count.parse().unwrap()),
        ["record", listen, address, file] => record(listen, address, file),
        ["replay", address, file] => replay(address, file),
        _ => return Err("usage: see the head of launcher-tests/worker/unauthenticated.rs".into()),
    }
    Ok(())
}

/// Returns first messages that an unauthenticated peer may send.
fn first_messages() -> Vec<Vec<u8>> {
    let magic = b"convoke\x02".to_vec();
    let with = |more: &[u8]| [magic.as_slice(), more].concat();
    vec![
        Vec::new(),
        b"con".to_vec(),
        magic.clone(),
        with(&[0xff; 4]),
        with(&2048_u32.to_le_bytes()),
        with(&[&16_u32.to_le_bytes()[..], &[7; 16]].concat()),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        // The first byte of a TCPStore client, without the remainder of its request.
        vec![0],
        vec![0xff; 4096],
    ]
}

fn flood(address: &str, count: usize) {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
    let first_messages = first_messages();
    let mut connections = Vec::new();
    for index in 0..count {
        // A refused connection is skipped; the next iteration connects again.
        let Ok(mut stream) = TcpStream::connect(address) else { continue };
        let _ = stream.write_all(&first_messages[index % first_messages.len()]);
        connections.push(stream);
    }
    println!("{}", connections.len());
    std::thread::sleep(HOLD_TIME);
}

fn record(listen: &str, address: &str, file: &str) {
    let mut file = Some(File::create(file).unwrap());
    for client in TcpListener::bind(listen).unwrap().incoming() {
        let (Ok(mut client), Ok(mut server)) = (client, TcpStream::connect(address)) else { continue };
        let (mut back, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut back, &mut to));
        let mut file = file.take();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(len @ 1..) = client.read(&mut bytes) {
                if server.write_all(&bytes[..len]).is_err() {
                    break;
                }
                if let Some(file) = &mut file {
                    file.write_all(&bytes[..len]).unwrap();
                }
            }
            let _ = server.shutdown(Shutdown::Both);
        });
    }
}

fn replay(address: &str, file: &str) {
    let recorded = std::fs::read(file).unwrap();
    assert!(recorded.len() > 100, "nothing was recorded");
    for len in (1..recorded.len()).step_by(recorded.len() / 16 + 1).chain([recorded.len()]) {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        let _ = stream.write_all(&recorded[..len]);
        let (mut answer, start) = (Vec::new(), Instant::now());
        // A truncated message makes the server wait for the remainder, until its own limit ends the
        // connection.
        while start.elapsed() < Duration::from_secs(1) {
            let mut bytes = [0; 4096];
            match stream.read(&mut bytes) {
                Ok(0) | Err(_) => break,
                Ok(count) => answer.extend_from_slice(&bytes[..count]),
            }
        }
        println!("{len} of {}: {} bytes", recorded.len(), answer.len());
    }
}
