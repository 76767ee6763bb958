//! The connection of the head to one host: a remote shell that runs the launcher agent there.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use sha2::{Digest, Sha256};

use super::frame::{Decoder, FromAgent, ToAgent, encode};
use super::list::Host;
use crate::formatting::hex;

/// Most bytes of a remote shell's own words that are kept.
const MAX_WORDS: usize = 16 << 10;
/// The line by which a host asks for the program, if it has not this version yet.
const NEEDS_PROGRAM: &[u8] = b"\x01convoke-needs-program\n";

/// Remote shells that give their words to a shell on the host. Others may start them as a program.
const SHELL_STARTERS: [&str; 3] = ["ssh", "rsh", "oarsh"];

/// The way in which launchers are started on hosts.
#[derive(Debug, Clone)]
pub(super) struct RemoteShell {
    /// The program and its first arguments.
    pub(super) words: Vec<String>,
    /// The program to copy to hosts that lack it; `None` without `--copy-binary`.
    pub(super) copies: Option<Arc<Vec<u8>>>,
}

/// An event on a connection. Each event names its host by number.
#[derive(Debug)]
pub(super) enum Event {
    Message {
        host: usize,
        message: FromAgent,
    },
    /// The connection has ended. `words` are the last words of the remote shell and the host.
    Closed {
        host: usize,
        words: String,
    },
    /// A signal to the head.
    Signal(i32),
}

/// The connection to one host. Dropping it ends everything on the host.
#[derive(Debug)]
pub(super) struct Connection {
    child: Child,
    stdin: Option<ChildStdin>,
}

impl Connection {
    /// Starts the remote shell. Its events go to `events`.
    pub(super) fn start(
        number: usize,
        host: &Host,
        shell: &RemoteShell,
        events: &Sender<Event>,
    ) -> std::io::Result<Self> {
        let own = std::env::current_exe()?;
        let mut command = if is_own(&host.name) {
            let mut command = Command::new(&own);
            command.arg("--agent");
            command
        } else {
            let mut command = Command::new(&shell.words[0]);
            command.args(&shell.words[1..]);
            let name = program_name(&shell.words[0]);
            if name == "ssh" {
                command.args([
                    "-o",
                    "BatchMode=yes",
                    "-o",
                    "ConnectTimeout=10",
                    "-o",
                    "ServerAliveInterval=5",
                    "-T",
                ]);
            }
            command.arg(&host.name);
            if shell.copies.is_some() || SHELL_STARTERS.contains(&name) {
                command.arg(remote_command(&own, shell.copies.as_ref().map(|program| &***program)));
            } else {
                // Both a program that starts the words and one that gives them to a shell take these two.
                command.arg(&own).arg("--agent");
            }
            command
        };
        // A Ctrl-C at the terminal must reach the launchers in order, and not end the connections.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn()?;
        let words = Arc::new(Mutex::new(Vec::new()));
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let reader = stderr.map(|stream| {
            let words = Arc::clone(&words);
            spawn(move || keep_words(stream, &words))
        });
        let stdin = child.stdin.take();
        let program = shell.copies.clone();
        let upload = stdin
            .as_ref()
            .zip(program)
            .and_then(|(stdin, program)| Some((clone_stdin(stdin).ok()?, program)));
        let events = events.clone();
        if let Some(stdout) = stdout {
            let _ = spawn(move || {
                let mut decoder = Decoder::default();
                let failure = read_agent(number, stdout, &mut decoder, upload, &events);
                if let Some(Ok(reader)) = reader {
                    let _ = reader.join();
                }
                let said = String::from_utf8_lossy(&words.lock().unwrap_or_else(PoisonError::into_inner))
                    .into_owned();
                let words = failure.unwrap_or_else(|| format!("{}{said}", decoder.noise()));
                let _ = events.send(Event::Closed { host: number, words });
            });
        }
        Ok(Self { child, stdin })
    }

    /// Sends a message to the agent. A lost connection is reported as an event.
    pub(super) fn send(&mut self, message: &ToAgent) {
        if let Some(stdin) = &mut self.stdin
            && stdin.write_all(&encode(message)).and_then(|()| stdin.flush()).is_err()
        {
            self.stdin = None;
        }
    }

    /// Returns the exit code of the remote shell, after its connection has closed.
    pub(super) fn exit_code(&mut self) -> Option<i32> {
        self.stdin = None;
        self.child.wait().ok()?.code()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The end of its stdin makes the agent end the launcher.
        self.stdin = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(work: impl FnOnce() + Send + 'static) -> std::io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name("convoke-host".into()).stack_size(256 << 10).spawn(work)
}

fn clone_stdin(stdin: &ChildStdin) -> std::io::Result<std::fs::File> {
    use std::os::fd::AsFd;
    Ok(stdin.as_fd().try_clone_to_owned()?.into())
}

/// Reads the agent's messages until the connection ends. Returns why the stream makes no sense.
fn read_agent(
    number: usize,
    mut stdout: impl Read,
    decoder: &mut Decoder,
    mut upload: Option<(std::fs::File, Arc<Vec<u8>>)>,
    events: &Sender<Event>,
) -> Option<String> {
    let mut bytes = vec![0; 64 << 10];
    loop {
        match stdout.read(&mut bytes) {
            Ok(count) if count > 0 => decoder.push(&bytes[..count]),
            _ => return None,
        }
        if upload.is_some() && decoder.contains(NEEDS_PROGRAM) {
            let (mut stdin, program) = upload.take()?;
            if stdin.write_all(&program).is_err() {
                return Some("the connection was lost while the program was copied".to_owned());
            }
        }
        loop {
            match decoder.next() {
                Ok(Some(message)) => {
                    upload = None;
                    if events.send(Event::Message { host: number, message }).is_err() {
                        return None;
                    }
                }
                Ok(None) => break,
                Err(error) => return Some(error.to_string()),
            }
        }
    }
}

/// Returns the last part of the path of a program.
pub(super) fn program_name(word: &str) -> &str {
    word.rsplit('/').next().unwrap_or(word)
}

/// Keeps the last words of a remote shell.
fn keep_words(mut stream: impl Read, words: &Mutex<Vec<u8>>) {
    let mut bytes = [0; 4096];
    while let Ok(count) = stream.read(&mut bytes)
        && count > 0
    {
        let mut words = words.lock().unwrap_or_else(PoisonError::into_inner);
        words.extend_from_slice(&bytes[..count]);
        let excess = words.len().saturating_sub(MAX_WORDS);
        words.drain(..excess);
    }
}

/// Returns true if the host is this one, which needs no remote shell.
fn is_own(host: &str) -> bool {
    let own = [crate::host_name::host_name(), crate::host_name::full_host_name()];
    host == "localhost"
        || own.iter().any(|name| name.eq_ignore_ascii_case(host))
        || host.parse().is_ok_and(|ip| crate::rendezvous::own_addresses().contains(&ip))
}

/// Returns the command for the host's shell: the program at the path that it has here, else in PATH. With a
/// `program` to copy, the one that lies in the user's cache, which is asked for if it is not there.
fn remote_command(own: &Path, program: Option<&[u8]>) -> OsString {
    let script = match program {
        Some(program) => {
            // The hash tells versions apart.
            let name = format!("convoke-{}", hex(&Sha256::digest(program)[..8]));
            let size = program.len();
            format!(
                "d=${{XDG_CACHE_HOME:-$HOME/.cache}}/convoke; f=$d/{name}; if [ ! -x $f ]; then mkdir -p $d || exit 126; \
                 printf \"\\001convoke-needs-program\\n\"; t=$(mktemp $d/XXXXXX) && head -c {size} > $t && chmod 755 $t && mv $t $f || exit 126; fi; \
                 exec $f --agent"
            )
        }
        None => match own.to_str().filter(|path| !path.contains(['\'', '"', '$', '`', '\\'])) {
            Some(path) => {
                format!("if [ -x \"{path}\" ]; then exec \"{path}\" --agent; fi; exec convoke --agent")
            }
            None => "exec convoke --agent".to_owned(),
        },
    };
    // The user's shell may be csh or fish; both pass a word in single quotes on unchanged.
    format!("exec /bin/sh -c '{script}'").into()
}
