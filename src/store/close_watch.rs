//! Sockets on which the loss of the other host must be seen within seconds.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

/// An idle connection is probed this often, and given up after [`PROBES`] without an answer.
const INTERVAL: Duration = Duration::from_secs(1);
const PROBES: u32 = 3;

/// Makes the kernel end `stream` within 4 s of the last sign of life of the other host.
///
/// Probes are answered by the other kernel, so a stopped or busy process does not count as lost. Not for
/// streams of bulk data: there a slow reader would count as lost. Without effect inside a host, which cannot lose
/// itself: there a core that its machine does not run for so long would count as lost.
pub(crate) fn watch_closely(stream: &TcpStream) -> io::Result<()> {
    if stream.local_addr()?.ip() == stream.peer_addr()?.ip() {
        return Ok(());
    }
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new().with_time(INTERVAL).with_interval(INTERVAL).with_retries(PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(INTERVAL * (PROBES + 1)))
}
