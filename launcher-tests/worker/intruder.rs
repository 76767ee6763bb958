//! Somebody on the network who does not belong to the job.
//!
//! ```text
//! test-worker intruder flood ADDRESS COUNT      opens so many connections, says a little on each, holds them for 3 s
//! test-worker intruder record LISTEN ADDRESS FILE   passes connections on, and writes down what callers of the first say
//! test-worker intruder replay ADDRESS FILE      says that again, whole and in parts; prints what comes back
//! ```

#![allow(clippy::unwrap_used, clippy::print_stdout)] // a part of tests

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};

const HELD: Duration = Duration::from_secs(3);

pub(super) fn run(arguments: &[&str]) -> super::Outcome {
    match *arguments {
        ["flood", address, count] => flood(address, count.parse().unwrap()),
        ["record", listen, address, file] => record(listen, address, file),
        ["replay", address, file] => replay(address, file),
        _ => return Err("usage: see the head of launcher-tests/worker/intruder.rs".into()),
    }
    Ok(())
}

/// What strangers may say first.
fn openings() -> Vec<Vec<u8>> {
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
        // A client of a TCPStore that goes no further than its first byte.
        vec![0],
        vec![0xff; 4096],
    ]
}

fn flood(address: &str, count: usize) {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
    let openings = openings();
    let mut held = Vec::new();
    for index in 0..count {
        // Whoever is refused comes again, as strangers do.
        let Ok(mut stream) = TcpStream::connect(address) else { continue };
        let _ = stream.write_all(&openings[index % openings.len()]);
        held.push(stream);
    }
    println!("{}", held.len());
    std::thread::sleep(HELD);
}

fn record(listen: &str, address: &str, file: &str) {
    let mut file = Some(File::create(file).unwrap());
    for caller in TcpListener::bind(listen).unwrap().incoming() {
        let (Ok(mut caller), Ok(mut called)) = (caller, TcpStream::connect(address)) else { continue };
        let (mut back, mut to) = (called.try_clone().unwrap(), caller.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut back, &mut to));
        let mut file = file.take();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(len @ 1..) = caller.read(&mut bytes) {
                if called.write_all(&bytes[..len]).is_err() {
                    break;
                }
                if let Some(file) = &mut file {
                    file.write_all(&bytes[..len]).unwrap();
                }
            }
            let _ = called.shutdown(Shutdown::Both);
        });
    }
}

fn replay(address: &str, file: &str) {
    let said = std::fs::read(file).unwrap();
    assert!(said.len() > 100, "nothing was recorded");
    for len in (1..said.len()).step_by(said.len() / 16 + 1).chain([said.len()]) {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        let _ = stream.write_all(&said[..len]);
        let (mut answer, start) = (Vec::new(), Instant::now());
        // What is cut off waits for its rest until the other side has had enough.
        while start.elapsed() < Duration::from_secs(1) {
            let mut bytes = [0; 4096];
            match stream.read(&mut bytes) {
                Ok(0) | Err(_) => break,
                Ok(count) => answer.extend_from_slice(&bytes[..count]),
            }
        }
        println!("{len} of {}: {} bytes", said.len(), answer.len());
    }
}
