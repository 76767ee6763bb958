//! Selects the connections that a rank opens when the group forms.

use crate::transport::links::hello::ConnectionKind;

/// Groups of at most this many ranks open all connections when they form. Larger groups open those that the
/// usual algorithms need, and the other connections on demand.
const FULL_MESH_RANKS: usize = 16;

/// Returns the control connections to all peers; they carry no data of collectives or messages.
pub(super) fn control_connections(rank: usize, size: usize) -> Vec<(usize, ConnectionKind)> {
    (0..size).filter(|&peer| peer != rank).map(|peer| (peer, ConnectionKind::Control)).collect()
}

/// Returns the connections that a rank opens at the start. Control connections go to all peers. Small
/// groups also open all data connections; larger groups open collective connections to peers at
/// power-of-two distances, which rings, trees and exchanges use.
pub(super) fn initial_connections(rank: usize, size: usize) -> Vec<(usize, ConnectionKind)> {
    let others = (0..size).filter(|&peer| peer != rank);
    let near = |peer: usize| {
        let ahead = (peer + size - rank) % size;
        ahead.is_power_of_two() || (size - ahead).is_power_of_two() || (rank ^ peer).is_power_of_two()
    };
    let all = size <= FULL_MESH_RANKS;
    others
        .flat_map(|peer| ConnectionKind::ALL.map(|conn_kind| (peer, conn_kind)))
        .filter(|&(peer, conn_kind)| match conn_kind {
            ConnectionKind::Control => true,
            ConnectionKind::Collective => all || near(peer),
            ConnectionKind::Message => all,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_peers_expect_the_same_connections() {
        for size in 1..40 {
            for rank in 0..size {
                for (peer, conn_kind) in initial_connections(rank, size) {
                    assert!(
                        initial_connections(peer, size).contains(&(rank, conn_kind)),
                        "{rank} {peer} of {size}"
                    );
                }
            }
        }
    }
}
