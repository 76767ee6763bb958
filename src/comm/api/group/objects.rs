//! Collectives of objects that serde can serialize; their sizes may differ between ranks.
//!
//! Objects are sent in the postcard format. Each operation takes two collectives: sizes first, then bytes.
//! A rank that cannot serialize its object sends a marker instead of a size, so that all ranks fail
//! together.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{CommError, Group};
use crate::error::require;

/// Largest object in bytes. A larger size is most likely an error, so no rank allocates memory for it.
const OBJECT_MAX_BYTES: u64 = 1 << 30;
/// Marker instead of a size: the object of this rank cannot be serialized.
const NOT_SERIALIZABLE: u64 = u64::MAX;

impl Group {
    /// Broadcasts the object of rank `root` to all ranks.
    ///
    /// The root passes `Some`, other ranks may pass `None`. All ranks name the same type.
    ///
    /// # Errors
    /// [`CommError::Object`] on all ranks if the object cannot be serialized or exceeds 1 GiB, and on ranks
    /// that cannot deserialize it. [`CommError::InvalidArgument`] on a root that passes `None`; the other
    /// ranks then wait for its object. Otherwise the errors of [`Self::broadcast`].
    ///
    /// # Cost
    /// Two broadcasts, of 8 bytes and of the object's size.
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &self,
        object: Option<T>,
        root: usize,
    ) -> Result<T, CommError> {
        let group = self.with_fixed_deadline();
        self.check_rank(root, "root")?;
        let is_root = self.rank() == root;
        require(!is_root || object.is_some(), || format!("rank {root} is the root and has no object"))?;
        let mine = if is_root { object.as_ref().map(serialize) } else { None };
        let mut size = [mine.as_ref().map_or(0, serialized_size)];
        group.broadcast(&mut size, root)?;
        check_size(root, size[0], mine.as_ref())?;
        let mut bytes = mine.and_then(Result::ok).map_or_else(|| buffer(size[0] as usize), Ok)?;
        group.broadcast(&mut bytes, root)?;
        object.filter(|_| is_root).map_or_else(|| deserialize(root, &bytes), Ok)
    }

    /// Gathers the objects of all ranks on all ranks, in rank order.
    ///
    /// # Errors
    /// [`CommError::Object`] on all ranks, naming the first rank whose object cannot be serialized or exceeds
    /// 1 GiB, and on ranks that cannot deserialize an object. Otherwise the errors of [`Self::all_gather`].
    ///
    /// # Cost
    /// Two all-gathers, of 8 bytes and of the objects' sizes.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(
        &self,
        object: &T,
    ) -> Result<Vec<T>, CommError> {
        let group = self.with_fixed_deadline();
        let (lens, mine) = group.announce(object)?;
        let mut bytes = buffer(lens.iter().sum())?;
        group.all_gather_v(&mine, &mut bytes, &lens)?;
        deserialize_all(&bytes, &lens)
    }

    /// Gathers the objects of all ranks on rank `root`, in rank order; returns `None` on other ranks.
    ///
    /// # Errors
    /// The errors of [`Self::all_gather_object`]; [`CommError::InvalidArgument`] if there is no rank `root`.
    ///
    /// # Cost
    /// An all-gather of 8 bytes, so that all ranks learn of an object that cannot be sent, and a gather of
    /// the objects' sizes.
    pub fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        object: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>, CommError> {
        let group = self.with_fixed_deadline();
        self.check_rank(root, "root")?;
        let (lens, mine) = group.announce(object)?;
        let is_root = self.rank() == root;
        let mut bytes = buffer(if is_root { lens.iter().sum() } else { 0 })?;
        group.gather_v(&mine, &mut bytes, &lens, root)?;
        if is_root { deserialize_all(&bytes, &lens).map(Some) } else { Ok(None) }
    }

    /// Scatters the objects of rank `root`, one for each rank, in rank order.
    ///
    /// The root passes `Some`, other ranks may pass `None`.
    ///
    /// # Errors
    /// [`CommError::Object`] on all ranks if the root cannot serialize an object or an object exceeds 1 GiB,
    /// and on a rank that cannot deserialize its own. [`CommError::InvalidArgument`] on a root that does not
    /// pass one object for each rank; other ranks then wait for it. Otherwise the errors of
    /// [`Self::scatter`].
    ///
    /// # Cost
    /// A broadcast of 8 bytes for each rank, and a scatter of the objects' sizes.
    pub fn scatter_object<T: Serialize + DeserializeOwned>(
        &self,
        objects: Option<Vec<T>>,
        root: usize,
    ) -> Result<T, CommError> {
        let group = self.with_fixed_deadline();
        self.check_rank(root, "root")?;
        let mut serialized = Vec::new();
        if self.rank() == root {
            let objects = objects.unwrap_or_default();
            let (have, want) = (objects.len(), self.size());
            require(have == want, || format!("{have} objects for {want} ranks"))?;
            serialized = objects.iter().map(serialize).collect();
        }
        let mut sizes: Vec<u64> = serialized.iter().map(serialized_size).collect();
        sizes.resize(self.size(), 0);
        group.broadcast(&mut sizes, root)?;
        let failed = serialized.iter().find(|written| written.is_err());
        sizes.iter().try_for_each(|&size| check_size(root, size, failed))?;
        let lens: Vec<usize> = sizes.iter().map(|&size| size as usize).collect();
        let written = serialized.into_iter().collect::<Result<Vec<_>, _>>();
        let send = written.expect("the check of the sizes refuses an object that cannot be written").concat();
        let mut bytes = buffer(lens[self.rank()])?;
        group.scatter_v(&send, &mut bytes, &lens, root)?;
        deserialize(root, &bytes)
    }

    /// Gathers and checks the sizes of all ranks' serialized objects; returns them, with this rank's object.
    fn announce<T: Serialize>(&self, object: &T) -> Result<(Vec<usize>, Vec<u8>), CommError> {
        let mine = serialize(object);
        let mut sizes = vec![0; self.size()];
        self.all_gather(&[serialized_size(&mine)], &mut sizes)?;
        for (rank, &size) in sizes.iter().enumerate() {
            check_size(rank, size, Some(&mine).filter(|_| rank == self.rank()))?;
        }
        let mine = mine.expect("the check of the sizes refuses an object that cannot be written");
        Ok((sizes.iter().map(|&size| size as usize).collect(), mine))
    }
}

/// The bytes of a serialized object, or the serialization error.
type Serialized = Result<Vec<u8>, String>;

fn serialize<T: Serialize>(object: &T) -> Serialized {
    postcard::to_stdvec(object).map_err(|error| error.to_string())
}

fn serialized_size(written: &Serialized) -> u64 {
    written.as_ref().map_or(NOT_SERIALIZABLE, |bytes| bytes.len() as u64)
}

/// Allocates a receive buffer. Other ranks determine its length, so a failed allocation is an error, not an
/// abort.
fn buffer(len: usize) -> Result<Vec<u8>, CommError> {
    let mut bytes = Vec::new();
    let refused =
        |error| CommError::system("cannot allocate memory for objects", std::io::Error::other(error));
    bytes.try_reserve_exact(len).map_err(refused)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// Checks that the object of rank `rank`, of `size` bytes, can be sent. `mine` is the object if this rank
/// serialized it.
fn check_size(rank: usize, size: u64, mine: Option<&Serialized>) -> Result<(), CommError> {
    let what = match (size, mine) {
        (NOT_SERIALIZABLE, Some(Err(error))) => format!("cannot be serialized: {error}"),
        (NOT_SERIALIZABLE, _) => "cannot be serialized there".to_owned(),
        (size, _) if size > OBJECT_MAX_BYTES => {
            format!("has {size} bytes, more than {OBJECT_MAX_BYTES}; send it as a buffer")
        }
        _ => return Ok(()),
    };
    Err(CommError::Object { rank, what })
}

fn deserialize<T: DeserializeOwned>(rank: usize, bytes: &[u8]) -> Result<T, CommError> {
    let error = |what: String| CommError::Object { rank, what };
    let (object, rest) = postcard::take_from_bytes(bytes).map_err(|cause| {
        error(format!("cannot be deserialized: {cause}; do both ranks use the same type?"))
    })?;
    if rest.is_empty() {
        return Ok(object);
    }
    Err(error(format!("has {} bytes too many; do both ranks use the same type?", rest.len())))
}

fn deserialize_all<T: DeserializeOwned>(bytes: &[u8], lens: &[usize]) -> Result<Vec<T>, CommError> {
    let mut rest = bytes;
    let one = |(rank, &len): (usize, &usize)| {
        let (object, others) = rest.split_at(len);
        rest = others;
        deserialize(rank, object)
    };
    lens.iter().enumerate().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In lists of lists, a false length could request the most memory.
    type Object = (u64, Option<String>, Vec<Vec<u64>>);

    #[test]
    fn random_objects_never_cause_a_panic() {
        let objects: [Object; 2] =
            [(7, Some("convoke".to_owned()), vec![vec![1; 3], vec![], vec![u64::MAX]]), (0, None, vec![])];
        let good = objects.map(|object| serialize(&object).unwrap());
        let decode = |bytes: &[u8]| deserialize::<Object>(0, bytes).ok();
        // Limit on the bytes that serde reserves for a list before its elements arrive.
        let most = 3 << 20;
        convoke_testkit::fuzz("random_objects_never_cause_a_panic", &good, most, decode, |object| {
            serialize(object).unwrap()
        });
    }
}
