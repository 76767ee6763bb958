//! TCP keepalive for sockets on which the loss of the peer's host must be detected within seconds.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

/// Interval of the probes on an idle connection. The connection fails after [`PROBES`] unanswered
/// probes.
const INTERVAL: Duration = Duration::from_secs(1);
const PROBES: u32 = 3;

/// Makes the kernel end `stream` 4 s after the last packet from the peer's host.
///
/// The peer's kernel answers the probes, so a stopped or busy process does not count as lost. Do not
/// use this on streams of bulk data, where a slow reader would count as lost. A connection within one
/// host is left as it is: a paused virtual CPU would count as lost.
pub(crate) fn set_fast_keepalive(stream: &TcpStream) -> io::Result<()> {
    if stream.local_addr()?.ip() == stream.peer_addr()?.ip() {
        return Ok(());
    }
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new().with_time(INTERVAL).with_interval(INTERVAL).with_retries(PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(INTERVAL * (PROBES + 1)))
}
