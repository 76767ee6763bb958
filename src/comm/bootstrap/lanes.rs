//! Selects the connections that a rank opens when the group forms.

use crate::links::hello::Lane;

/// Groups up to this size open all connections at once. Larger groups open the usual ones, and the others
/// on demand.
const FULL_MESH_RANKS: usize = 16;

/// Returns the control connections to all peers; they carry no data of collectives or messages.
pub(super) fn control(rank: usize, size: usize) -> Vec<(usize, Lane)> {
    (0..size).filter(|&peer| peer != rank).map(|peer| (peer, Lane::Control)).collect()
}

/// Returns the connections that a rank opens at the start. Control lanes go to all peers. Small groups also
/// open all data lanes; larger groups open collective lanes to peers at power-of-two distances, which
/// rings, trees and exchanges use.
pub(super) fn lanes(rank: usize, size: usize) -> Vec<(usize, Lane)> {
    let others = (0..size).filter(|&peer| peer != rank);
    let near = |peer: usize| {
        let ahead = (peer + size - rank) % size;
        ahead.is_power_of_two() || (size - ahead).is_power_of_two() || (rank ^ peer).is_power_of_two()
    };
    let all = size <= FULL_MESH_RANKS;
    others
        .flat_map(|peer| Lane::ALL.map(|lane| (peer, lane)))
        .filter(|&(peer, lane)| match lane {
            Lane::Control => true,
            Lane::Collective => all || near(peer),
            Lane::Message => all,
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
                for (peer, lane) in lanes(rank, size) {
                    assert!(lanes(peer, size).contains(&(rank, lane)), "{rank} {peer} of {size}");
                }
            }
        }
    }
}
