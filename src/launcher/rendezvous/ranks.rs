//! Worker ranks of the static rendezvous, in the JSON format of torchrun's agents. Pure.

use serde::{Deserialize, Serialize};

use crate::membership;
/// Worker ranks that node 0 assigns to a node, stored under the key `torchelastic/assigned_ranks/<node>`.
pub(crate) use crate::membership::Ranks;

/// Description that a node publishes of itself, stored under the key `torchelastic/role_info/<node>`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RoleInfo {
    pub(crate) role: String,
    /// Group rank of the node.
    pub(crate) rank: usize,
    pub(crate) local_world_size: usize,
}

/// Returns the worker ranks of all nodes, in the order of `nodes`; see [`membership::assign`].
pub(crate) fn assign(nodes: &[RoleInfo]) -> Vec<Ranks> {
    membership::assign(nodes.iter().map(|node| (node.role.as_str(), node.local_world_size)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::formatting::python_json;

    fn node(role: &str, rank: usize, local_world_size: usize) -> RoleInfo {
        RoleInfo { role: role.to_owned(), rank, local_world_size }
    }

    #[test]
    fn ranks_are_cumulative_in_node_order_and_within_roles() {
        let nodes = [node("x", 0, 2), node("y", 1, 1), node("x", 2, 3)];
        assert_eq!(assign(&nodes), [(0, 6, 0, 5), (2, 6, 0, 1), (3, 6, 2, 5)]);
    }

    proptest! {
        /// All nodes get ranks, whatever numbers they send. The ranks have no gaps if the numbers are
        /// possible.
        #[test]
        fn any_nodes_get_contiguous_ranks(
            sizes in prop::collection::vec(prop_oneof![4 => 1..9_usize, 1 => any::<usize>()], 1..6),
        ) {
            let nodes: Vec<_> = (0..).zip(&sizes).map(|(rank, &size)| node("x", rank, size)).collect();
            let texts: Vec<_> = nodes.iter().map(python_json).collect();
            let read = texts.iter().map(|text| serde_json::from_str::<RoleInfo>(text).unwrap());
            prop_assert!(read.eq(nodes.iter().cloned()));
            let ranks = assign(&nodes);
            if let Some(all) = sizes.iter().try_fold(0_usize, |sum, &size| sum.checked_add(size)) {
                prop_assert_eq!(ranks[0].0, 0);
                let ends = ranks.iter().zip(&sizes).map(|(ranks, size)| ranks.0 + size);
                prop_assert!(ends.eq(ranks.iter().skip(1).map(|ranks| ranks.0).chain([all])));
            }
        }
    }

    #[test]
    fn rank_messages_match_the_json_of_torchrun() {
        assert_eq!(python_json(&node("a\"b", 1, 2)), r#"{"role": "a\"b", "rank": 1, "local_world_size": 2}"#);
        assert_eq!(python_json(&assign(&[node("x", 0, 1)])[0]), "[0, 1, 0, 1]");
    }
}
