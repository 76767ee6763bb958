//! TCP keepalive, by which the kernel detects the loss of the peer's host.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

/// Number of unanswered probes after which a connection fails.
const PROBES: u32 = 3;
/// Interval of the probes of [`set_fast_keepalive`].
const INTERVAL: Duration = Duration::from_secs(1);

/// Makes the kernel probe an idle connection after the time `idle`, and then every `interval`.
pub(crate) fn set_keepalive(socket: &impl AsFd, idle: Duration, interval: Duration) -> io::Result<()> {
    let keepalive = TcpKeepalive::new().with_time(idle).with_interval(interval).with_retries(PROBES);
    SockRef::from(socket).set_tcp_keepalive(&keepalive)
}

/// Makes the kernel end `stream` 4 s after the last packet from the peer's host.
///
/// The peer's kernel answers the probes, so a stopped or busy process does not count as lost. Do not
/// use this on streams of bulk data, where a slow reader would count as lost. A connection within one
/// host is left as it is: a paused virtual CPU would count as lost.
pub(crate) fn set_fast_keepalive(stream: &TcpStream) -> io::Result<()> {
    if stream.local_addr()?.ip() == stream.peer_addr()?.ip() {
        return Ok(());
    }
    set_keepalive(stream, INTERVAL, INTERVAL)?;
    SockRef::from(stream).set_tcp_user_timeout(Some(INTERVAL * (PROBES + 1)))
}
