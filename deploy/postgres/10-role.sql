-- Run it in the tables' database as a superuser, by psql for example. Then give the role a password there, by
-- \password and its name: so the password itself is in no log. Then, as the new role: roir init.
BEGIN;
DO $roir$
BEGIN
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) 'roir') THEN
    CREATE ROLE "roir" LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS;
  END IF;
  -- For roir init, which makes the schemas roir and roir_data.
  EXECUTE pg_catalog.format('GRANT CONNECT, CREATE, TEMPORARY ON DATABASE %I TO %I',
                            pg_catalog.current_database(), 'roir');
END
$roir$;
-- For the views of the indexes.
GRANT USAGE, CREATE ON SCHEMA "public" TO "roir";
COMMIT;
