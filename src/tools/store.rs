//! `convoke-store`: a standalone TCPStore server for clients of torch and convoke.

use std::io::{self, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::process::ExitCode;

use clap::Parser;
use convoke_store::{ServeError, StoreServer};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// Serves a key-value store in the c10d TCPStore protocol, for torch.distributed and convoke.
///
/// Prints `listening on ADDRESS:PORT` for each address once clients can connect. Ends with exit code 0 on
/// SIGTERM or SIGINT; what was stored is gone then. Whoever can reach the port can read and write
/// everything: listen only where the job's own hosts are.
#[derive(Debug, Parser)]
#[command(name = "convoke-store", version)]
struct Flags {
    /// Address or host name to listen at; `::` is every address of this host, IPv4 included
    #[arg(long, default_value = "127.0.0.1")]
    host: String,

    /// Port to listen at; 0 picks a free one, which is printed
    #[arg(long, default_value_t = 29500)]
    port: u16,
}

fn main() -> ExitCode {
    match run(&Flags::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_stderr(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// An error that ends `convoke-store`.
#[derive(Debug, thiserror::Error)]
enum ToolError {
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error("cannot look up {host}: {source}")]
    LookUp { host: String, source: io::Error },
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: Errno },
    #[error("cannot write to stdout: {0}")]
    Print(io::Error),
}

fn run(flags: &Flags) -> Result<(), ToolError> {
    // Signals are blocked before the server's thread starts, so that the thread inherits the mask.
    let signals = catch_signals().map_err(|source| ToolError::System { what: "catch signals", source })?;
    let server = serve(&look_up(&flags.host, flags.port)?)?;
    let mut stdout = io::stdout().lock();
    for address in server.addresses() {
        writeln!(stdout, "listening on {address}").map_err(ToolError::Print)?;
    }
    stdout.flush().map_err(ToolError::Print)?;
    loop {
        let failed = |source| ToolError::System { what: "wait for signals", source };
        if wait_for_signal(&signals).map_err(failed)? {
            server.shutdown();
            return Ok(());
        }
        if let Some(warning) = server.take_warning() {
            print_stderr(&format!("warning: {warning}"));
        }
    }
}

fn look_up(host: &str, port: u16) -> Result<Vec<SocketAddr>, ToolError> {
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let found = (host, port).to_socket_addrs();
    let mut addresses: Vec<_> =
        found.map_err(|source| ToolError::LookUp { host: host.to_owned(), source })?.collect();
    addresses.dedup();
    Ok(addresses)
}

/// Serves a store at all `addresses` of a name. Addresses that this host does not have are skipped if another
/// address works.
fn serve(addresses: &[SocketAddr]) -> Result<StoreServer, ServeError> {
    match StoreServer::bind(addresses) {
        Err(ServeError::Listen { address, source })
            if source.kind() == io::ErrorKind::AddrNotAvailable && addresses.len() > 1 =>
        {
            let others: Vec<_> = addresses.iter().copied().filter(|other| *other != address).collect();
            serve(&others)
        }
        result => result,
    }
}

fn catch_signals() -> Result<SignalFd, Errno> {
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    signals.thread_block()?;
    SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// Waits for at most a second for SIGTERM or SIGINT. Returns whether such a signal has arrived.
fn wait_for_signal(signals: &SignalFd) -> Result<bool, Errno> {
    match poll(&mut [PollFd::new(signals.as_fd(), PollFlags::POLLIN)], PollTimeout::from(1000_u16)) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno::EINTR) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes a line to stderr. A failed write is ignored, because it means that nobody reads stderr.
fn print_stderr(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}
