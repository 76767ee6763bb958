//! Addresses of this host: where to listen, and which addresses other hosts can use to reach this host.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use convoke_env::Generation;
use convoke_store::{ServeError, Store, TcpStore};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::task::spawn_blocking;
use tokio::time::timeout_at;

use crate::formatting;
use crate::host_name::{full_host_name, host_name};
use crate::rendezvous::interfaces::{self, ANY, LOOPBACK, local};

/// Key in the workers' key-value store of a round. Its value, the round's generation, tells a node that it
/// has reached the store of its round.
pub(super) const GENERATION_KEY: &[u8] = b"convoke/generation";
/// Longest time for which a node tries the addresses of the workers' key-value store.
const FIND_STORE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after the first address of a store has answered, during which an address earlier in the list is
/// preferred if it answers.
const PREFERENCE_DELAY: Duration = Duration::from_millis(100);
/// Maximum number of addresses of a store that a node announces or tries.
const MAX_ADDRESSES: usize = 16;

/// Returns the addresses to listen at so that peers that connect to `host` reach this process. Returns `None`
/// if `host` is another host. `resolved` holds the addresses of the name `host`.
pub(super) fn listening_addresses(host: &str, port: u16, resolved: &[IpAddr]) -> Option<Vec<SocketAddr>> {
    let own = interfaces::own_addresses();
    let is_own = |ip: &IpAddr| ip.is_loopback() || own.contains(ip);
    if let Ok(ip) = host.parse::<IpAddr>() {
        return is_own(&ip).then(|| vec![SocketAddr::new(ip, port)]);
    }
    if host == "localhost" {
        return Some(local(&LOOPBACK, port).collect());
    }
    // A name of this host may resolve differently on other hosts, for example to 127.0.1.1 in /etc/hosts.
    let named = [host_name(), full_host_name()].iter().any(|name| is_short_for(host, name));
    (named || resolved.iter().any(is_own)).then(|| local(&ANY, port).take(1).collect())
}

/// Returns true if `short` is `name` or its first parts. A resolver completes such a name with a domain. A pod's name
/// has no address until the cluster's name server has learnt of the pod.
fn is_short_for(short: &str, name: &str) -> bool {
    let begin = name.get(..short.len());
    let ends = matches!(name.as_bytes().get(short.len()), None | Some(b'.'));
    ends && begin.is_some_and(|begin| begin.eq_ignore_ascii_case(short))
}

/// Listens at a free port on all addresses.
pub(super) fn listen_anywhere() -> Result<Vec<TcpListener>, ServeError> {
    let [six, four] = ANY.map(|ip| SocketAddr::new(ip, 0));
    convoke_store::listen(&[six]).or_else(|_| convoke_store::listen(&[four]))
}

/// Returns the addresses of a key-value store for workers that this node serves at `port`. The result is
/// `own` if the user set that. Otherwise it is `route_address`, by which this host reaches the coordinator,
/// followed by the other addresses of this host.
pub(super) fn store_addresses(own: Option<&str>, route_address: Option<IpAddr>, port: u16) -> Vec<String> {
    if let Some(own) = own {
        return vec![formatting::address(own, port)];
    }
    let mut all: Vec<IpAddr> = route_address.into_iter().collect();
    all.extend(interfaces::own_addresses().into_iter().filter(|ip| Some(*ip) != route_address));
    all.truncate(MAX_ADDRESSES);
    all.into_iter().map(|ip| SocketAddr::new(ip, port).to_string()).collect()
}

/// Returns host and port of the address in `addresses` at which the workers' key-value store of this
/// generation answers. An address later in the list is chosen only if the earlier addresses take longer by
/// [`PREFERENCE_DELAY`].
///
/// # Errors
/// The errors of all addresses.
pub(super) async fn find_store(
    addresses: &[String],
    generation: Generation,
) -> Result<(String, u16), String> {
    let deadline = Instant::now() + FIND_STORE_TIMEOUT;
    let addresses = &addresses[..addresses.len().min(MAX_ADDRESSES)];
    let mut attempts: FuturesUnordered<_> = addresses
        .iter()
        .cloned()
        .enumerate()
        .map(async |(index, address)| {
            let answer = spawn_blocking(move || reach_store(&address, generation, deadline)).await;
            (index, answer.unwrap_or_else(|error| Err(error.to_string())))
        })
        .collect();
    let (mut failed, mut open) = (Vec::new(), vec![true; addresses.len()]);
    let (mut best, mut until): (Option<usize>, Instant) = (None, deadline + PREFERENCE_DELAY);
    while best.is_none_or(|best| open[..best].contains(&true))
        && let Ok(Some((index, answer))) = timeout_at(until.into(), attempts.next()).await
    {
        open[index] = false;
        match answer {
            Ok(()) if best.is_some() => best = best.min(Some(index)),
            Ok(()) => (best, until) = (Some(index), Instant::now() + PREFERENCE_DELAY),
            Err(error) => failed.push(error),
        }
    }
    match best {
        Some(best) => split(&addresses[best]),
        None => Err(format!(
            "the store of the workers cannot be reached at any of its addresses: {}",
            failed.join("; ")
        )),
    }
}

/// Checks that the store at this address is that of the generation.
fn reach_store(address: &str, generation: Generation, deadline: Instant) -> Result<(), String> {
    let store = TcpStore::connect(address, deadline).map_err(|error| error.to_string())?;
    let found = store.get(GENERATION_KEY, deadline).map_err(|error| error.to_string())?;
    if found != generation.to_string().as_bytes() {
        return Err(format!("{address}: this is the store of another job"));
    }
    Ok(())
}

/// Returns host and port of an address of a store.
pub(super) fn split(address: &str) -> Result<(String, u16), String> {
    let parts = address.rsplit_once(':').and_then(|(host, port)| Some((host.to_owned(), port.parse().ok()?)));
    let (host, port): (String, u16) = parts.ok_or_else(|| format!("{address:?} is not HOST:PORT"))?;
    Ok((host.trim_matches(['[', ']']).to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_parts_of_a_name_are_short_for_it() {
        let name = "train-0.train.ml.svc.cluster.local";
        for short in ["train-0", "train-0.train", "Train-0.Train.ml", name] {
            assert!(is_short_for(short, name), "{short}");
        }
        for other in
            ["train", "train-0.tr", "train-1.train", "train-0.train.ml.svc.cluster.local.x", "train-00"]
        {
            assert!(!is_short_for(other, name), "{other}");
        }
    }

    #[tokio::test]
    async fn store_of_this_generation_is_found() {
        let generation = Generation::from_bytes([7; 16]);
        let server = convoke_store::StoreServer::bind(&[SocketAddr::from(([127, 0, 0, 1], 0))]).unwrap();
        let deadline = Instant::now() + FIND_STORE_TIMEOUT;
        server.store().set(GENERATION_KEY, generation.to_string().as_bytes(), deadline).unwrap();
        let right = server.addresses()[0].to_string();
        // No process listens at the first address.
        let addresses = ["127.0.0.1:1".to_owned(), right.clone()];
        let found = find_store(&addresses, generation).await.unwrap();
        assert_eq!(found, ("127.0.0.1".to_owned(), server.port()));
        let other = Generation::from_bytes([8; 16]);
        let other_job = find_store(&[right], other).await.unwrap_err();
        assert!(other_job.contains("the store of another job"), "{other_job}");
    }

    #[test]
    fn offered_addresses_are_user_choice_or_all_with_likeliest_first() {
        assert_eq!(store_addresses(Some("h1"), None, 5), ["h1:5"]);
        assert_eq!(store_addresses(Some("fe80::1"), None, 5), ["[fe80::1]:5"]);
        let route_address: IpAddr = [10, 9, 8, 7].into();
        let all = store_addresses(None, Some(route_address), 5);
        assert_eq!(all[0], "10.9.8.7:5");
        assert!(all.iter().all(|address| split(address).is_ok()));
    }

    #[test]
    fn endpoint_is_served_only_by_its_own_host() {
        let at = |host: &str, resolved: &[IpAddr]| listening_addresses(host, 5, resolved);
        assert_eq!(at("127.0.0.1", &[]), Some(vec![SocketAddr::from(([127, 0, 0, 1], 5))]));
        assert_eq!(at("192.0.2.77", &[]), None, "of another host");
        // Peers may resolve a name differently, whatever it means here.
        for (host, resolved) in [(host_name(), vec![]), ("alias".to_owned(), vec![[127, 0, 1, 1].into()])] {
            assert!(at(&host, &resolved).is_some_and(|all| all[0].ip().is_unspecified()), "{host}");
        }
        assert_eq!(at("elsewhere", &[[192, 0, 2, 77].into()]), None);
    }
}
