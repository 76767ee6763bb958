//! Collectives of objects.

use crate::Group;

use super::handles::TestError;
use super::random_program::Objects;
use super::values::hash;

/// An arbitrary type that serde can write, with values of different sizes.
type Object = (u64, Option<String>, Vec<u16>);

fn object(seed: u64, rank: usize) -> Object {
    let random = hash(seed, rank, 0);
    let text = (!random.is_multiple_of(3)).then(|| "convoke ".repeat(random as usize % 50));
    let long = if random.is_multiple_of(20) { 40_000 } else { 20 };
    (random, text, (0..(random >> 8) as usize % long).map(|index| hash(seed, rank, index) as u16).collect())
}

pub(crate) fn exchange(group: &Group, what: &Objects) -> Result<(), TestError> {
    let (me, size) = (group.rank(), group.size());
    let all = |seed| (0..size).map(|rank| object(seed, rank)).collect::<Vec<_>>();
    let right = match *what {
        Objects::Broadcast { root, seed } => {
            let mine = (me == root).then(|| object(seed, root));
            group.broadcast_object(mine, root)? == object(seed, root)
        }
        Objects::AllGather { seed } => group.all_gather_object(&object(seed, me))? == all(seed),
        Objects::Gather { root, seed } => {
            group.gather_object(&object(seed, me), root)? == (me == root).then(|| all(seed))
        }
        Objects::Scatter { root, seed } => {
            group.scatter_object((me == root).then(|| all(seed)), root)? == object(seed, me)
        }
    };
    if right { Ok(()) } else { Err("other objects than were given".to_owned().into()) }
}
