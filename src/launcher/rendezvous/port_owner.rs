//! Finds the process that listens on a port of this host, from /proc.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use convoke_env::host::kernel_file;

/// State of a listening socket in /proc/net/tcp.
const LISTEN: &str = "0A";

/// Returns the process that listens on `port`, as `name (pid N)`. Returns `None` if that process is unknown
/// (it belongs to another user or runs in another container).
pub(super) fn port_owner(port: u16) -> Option<String> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| kernel_file::read(Path::new(path)));
    let inodes: HashSet<String> = tables.iter().flat_map(|table| listening_inodes(table, port)).collect();
    let owns = |pid: &i32| {
        let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
        descriptors.flatten().any(|descriptor| {
            let target = fs::read_link(descriptor.path()).unwrap_or_default();
            let target = target.to_string_lossy();
            let inode = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
            inode.is_some_and(|inode| inodes.contains(inode))
        })
    };
    let mut pids =
        fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let pid = if inodes.is_empty() { None } else { pids.find(owns) }?;
    Some(format!("{} (pid {pid})", kernel_file::process_name(pid)))
}

/// Returns the inodes of the sockets that listen on `port`. `table` is the text of /proc/net/tcp or
/// /proc/net/tcp6.
fn listening_inodes(table: &str, port: u16) -> Vec<String> {
    let port = format!("{port:04X}");
    let inode = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (local, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
        (local.rsplit_once(':')?.1 == port && *state == LISTEN).then(|| (*inode).to_owned())
    };
    table.lines().filter_map(inode).collect()
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};

    use socket2::{Domain, Socket, Type};

    use super::*;

    #[test]
    fn listener_is_found_for_ipv4_and_ipv6() {
        is_found(&TcpListener::bind("127.0.0.1:0").unwrap());
        match TcpListener::bind("[::1]:0") {
            Ok(listener) => is_found(&listener),
            Err(error) => convoke_testkit::skip(format_args!("the half with IPv6: {error}")),
        }
    }

    fn is_found(listener: &TcpListener) {
        let found = port_owner(listener.local_addr().unwrap().port()).unwrap();
        assert!(found.ends_with(&format!("(pid {})", std::process::id())), "{found}");
    }

    #[test]
    fn free_port_has_no_owner() {
        // The socket is bound, so that no other process gets the port, but it does not listen.
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        assert_eq!(port_owner(address.port()), None);
        assert_eq!(listening_inodes("garbage\n1: x y\n", 80), Vec::<String>::new());
    }
}
